"""`kielo export`: a checkpoint → a folder that `transformers` loads, or that llama.cpp and Ollama load."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kielo.artifact.checkpoint_folder import INDEX_NAME, run_around
from kielo.artifact.checkpoint_index import read_state
from kielo.artifact.manifest import read_manifest
from kielo.cli.flags import takes
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_text
from kielo.recipe.errors import KieloError
from kielo.recipe.places import conversion, place
from kielo.recipe.read import RUN_RECIPE_NAME, is_shipped, read_recipe, run_folder
from kielo.recipe.sections import Recipe
from kielo.report.model_card import loading_call
from kielo.stages.results import export_checkpoint, export_gguf, newest_checkpoint


@takes("""
    $ kielo export demo_estonian --to my_model
    $ kielo export runs/demo_estonian/train/checkpoints/step_00000732 --to my_model --dtype bf16
    $ kielo export demo_estonian --to my_gguf --format gguf --dtype q8_0
    CHECKPOINT                       folder of a checkpoint, or a recipe or a run folder (its newest complete
                                     checkpoint)
    --set KEY=VALUE
    --to DIR!                        folder to make; the same command continues an interrupted export
    --format {hugging_face,gguf}     gguf: a file for llama.cpp, Ollama and LM Studio, with a Modelfile.
                                     Default: hugging_face
    --dtype {source,fp32,bf16,fp16,q8_0}  dtype of the weights; source: names and dtypes of the first weights;
                                     q8_0: 8 bits, in a GGUF file. Default: source if the run began from
                                     weights, else fp32
    --max-shard-gb GB:float          largest size of a weights file; default: 5
    --tokenizer DIR                  folder with a tokenizer.json; default: the run's
    --json                           print the summary as JSON
""")
def export(options: argparse.Namespace) -> None:
    to = place(options.to)
    if Path(options.to).name in ("", ".."):
        raise KieloError(f"--to {options.to}: no name of a folder. Fix: --to my_model")
    with keep_stdout_for_json(options.json):
        checkpoint, recipe = _checkpoint(options.checkpoint, options.sets)
        if recipe is not None:
            _refuse_other_model(checkpoint, recipe, options.sets)
        tokenizer_folder = _tokenizer_folder(checkpoint, options.tokenizer)
        size, most = {}, options.max_shard_gb
        if most is not None:
            if not 0 < most < math.inf:
                raise KieloError(f"--max-shard-gb {most:g}: give a number above 0; 5 is usual")
            size["max_shard_bytes"] = int(most * 1e9)
        if options.format == "gguf":
            _export_gguf(options, checkpoint, to, tokenizer_folder, recipe)
            return
        model = export_checkpoint(
            checkpoint, to, tokenizer_folder, recipe, dtype=options.dtype, is_replacing=False, **size
        )
    if options.json:
        return print_json(_summary(checkpoint, to))
    call = loading_call(model.model_type, repr(str(to)))
    print_text(f"wrote {to} from {checkpoint.name}; load it with transformers.{call}")


def _export_gguf(
    options: argparse.Namespace, checkpoint: Path, to: Path, tokenizer_folder: Path, recipe: Recipe | None
) -> None:
    if options.max_shard_gb is not None:
        raise KieloError("--max-shard-gb: a GGUF file is one file. Fix: without --max-shard-gb")
    proof = export_gguf(checkpoint, to, tokenizer_folder, recipe, options.dtype)
    if options.json:
        print_json(_summary(checkpoint, to))
        return
    (file,) = to.glob("*.gguf")
    if proof and proof.program:
        print_text(f"{proof.documents:,} texts have the same ids in llama.cpp ({proof.program})")
    elif proof:
        print_text("the ids were not compared: no llama.cpp here. Fix: pip install cyllama, and export again")
    print_text(f"wrote {file} from {checkpoint.name}; run it with: llama-cli -m {file}")


def _checkpoint(reference: str, sets: Sequence[str]) -> tuple[Path, Recipe | None]:
    """Return a checkpoint, of a run its newest complete checkpoint, and the recipe of its run, if any."""
    path = Path(reference)
    is_run = (path / "train" / "checkpoints").is_dir()
    if is_run or (path / INDEX_NAME).is_file():
        run = path if is_run else run_around(path)
        return newest_checkpoint(path) if is_run else path, _recipe_of(run, sets)
    if path.is_dir() or not (path.is_file() or is_shipped(reference)):
        what = "folder, checkpoint or recipe"
        if path.is_dir():
            what = f"checkpoint (no {INDEX_NAME} there) and no run folder (no train/checkpoints)"
        raise KieloError(f"{path}: no {what}; see `kielo checkpoint list RUN`")
    recipe = read_recipe(reference, sets).recipe
    return newest_checkpoint(run_folder(recipe)), recipe


def _refuse_other_model(checkpoint: Path, recipe: Recipe, sets: Sequence[str]) -> None:
    """Refuse values of --set that differ from the checkpoint's model, which is exported as it is."""
    stored = (read_state(checkpoint).identity or {}).get("model", {})
    given = recipe.model.model_dump(mode="json")
    for text in sets:
        section, _, key = text.partition("=")[0].strip().partition(".")
        if section == "model" and key in stored and stored[key] != given.get(key):
            has = f"{key} = {json.dumps(stored[key])}"
            raise KieloError(f"--set {text}: the model of {checkpoint} has {has}. Fix: leave it out")


def _recipe_of(run: Path | None, sets: Sequence[str]) -> Recipe | None:
    """Return the recipe of a run folder; None, with a warning, if none can be read."""
    try:
        if run is not None and (sets or (run / RUN_RECIPE_NAME).is_file()):
            return read_recipe(run, sets).recipe
        why = f"{run}: has no {RUN_RECIPE_NAME}" if run else "the checkpoint is in no run folder"
    except KieloError as error:
        if sets:
            raise
        why = str(error)
    print_text(
        f"warning: {why}, so the model card has no licence, languages and sources. Fix: kielo export RECIPE",
        sys.stderr,
    )
    return None


def _tokenizer_folder(checkpoint: Path, given: str | None) -> Path:
    if given is not None:
        folder, hint = Path(given), "name a folder that has one"
    else:
        folder, hint = (run_around(checkpoint) or checkpoint.parent) / "tokenizer", "give --tokenizer DIR"
    if not (folder / "tokenizer.json").is_file():
        raise KieloError(
            f"{checkpoint}: there is no tokenizer.json in {folder} to export with it"
            + (conversion(folder) or f"; {hint}")
        )
    return folder


def _summary(checkpoint: Path, to: Path) -> dict[str, Any]:
    manifest = read_manifest(to)
    if manifest is None:
        raise KieloError(f"{to}: the new export is gone")
    return {
        "folder": str(to),
        "checkpoint": str(checkpoint),
        "dtype": manifest.section["dtype"],
        "wall_seconds": manifest.wall_seconds,
        **manifest.counts,
        "bytes": {name: record.bytes for name, record in manifest.files.items()},
    }
