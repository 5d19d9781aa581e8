"""`kielo export`: a checkpoint → a folder that `transformers` loads."""

import argparse
import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kielo.artifact.checkpoint_folder import run_around
from kielo.cli.flags import examples
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_text
from kielo.recipe.errors import KieloError
from kielo.recipe.tokenizer_folder import conversion


def export_flags(parser: argparse.ArgumentParser) -> None:
    examples(
        parser, "kielo export runs/demo_estonian --to my_model",
        "kielo export runs/demo_estonian/train/checkpoints/step_00000732 --to my_model --dtype bf16",
    )  # fmt: skip
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="folder of a checkpoint, or of a run (its newest whole one)"
    )
    parser.add_argument(
        "--to", required=True, metavar="DIR", help="folder to make; cut short, the same command goes on"
    )
    parser.add_argument(
        "--dtype",
        choices=("source", "fp32", "bf16", "fp16"),
        help="source: names and dtypes of the weights that training began from; default: source where "
        "there were any, else fp32",
    )
    parser.add_argument(
        "--max-shard-gb", type=float, metavar="GB", help="size of a file of weights; default: 5"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="folder with a tokenizer.json; default: the run's")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def export(options: argparse.Namespace) -> None:
    to = Path(options.to)
    if to.name in ("", ".."):
        raise KieloError(f"--to {options.to}: give the name of a folder to make")
    with keep_stdout_for_json(options.json):
        checkpoint = _checkpoint(Path(options.checkpoint))
        tokenizer_folder = _tokenizer_folder(checkpoint, options.tokenizer)
        size = {}
        if options.max_shard_gb is not None:
            if not 0 < options.max_shard_gb < math.inf:
                raise KieloError(
                    f"--max-shard-gb {options.max_shard_gb:g}: give a number above 0; 5 is usual"
                )
            size["max_shard_bytes"] = int(options.max_shard_gb * 1e9)
        export_checkpoint(checkpoint, to, tokenizer_folder, dtype=options.dtype, is_replacing=False, **size)
    if options.json:
        return print_json(_summary(checkpoint, to))
    print_text(
        f"wrote {to} from {checkpoint.name}; load it with "
        f"transformers.AutoModelForCausalLM.from_pretrained({str(to)!r}, dtype='auto')"
    )


def export_checkpoint(checkpoint: Path, to: Path, tokenizer_folder: Path, **how: Any) -> None:
    """Export a checkpoint to the folder `to`; does nothing when `to` holds that export already.

    The model's settings come from the checkpoint itself.

    how: fields of `ExportOptions`. Raises KieloError for another tokenizer than the one that made
    the tokens.
    """
    from kielo.artifact.checkpoint_index import read_plain
    from kielo.checkpoint.export_stage import ExportOptions, wanted_export
    from kielo.dataset.provenance import check_tokenizer_of_checkpoint
    from kielo.recipe.sections import Model

    plain = read_plain(checkpoint)
    identity = plain.get("identity")
    if not identity:
        raise KieloError(f"{checkpoint}: does not say of which model it is, so it cannot be exported")
    check_tokenizer_of_checkpoint(plain, run_around(checkpoint), tokenizer_folder)
    try:
        model = Model.model_validate(identity["model"])
    except (KeyError, TypeError, ValidationError) as error:
        raise KieloError(
            f"{checkpoint}: what it says of its model is none that this kielo knows ({error})"
        ) from None
    options = ExportOptions(**how)
    if wanted_export(checkpoint, to, model, tokenizer_folder, options).stage.is_done():
        return
    from kielo.checkpoint.hugging_face_export import export

    export(checkpoint, to, model, tokenizer_folder, options)


def _checkpoint(path: Path) -> Path:
    """Returns the checkpoint folder itself, or the newest whole one of a run folder."""
    from kielo.artifact.checkpoint_folder import INDEX_NAME
    from kielo.cli.checkpoint import newest_checkpoint

    if (path / INDEX_NAME).is_file():
        return path
    if (path / "train" / "checkpoints").is_dir():
        return newest_checkpoint(path)
    raise KieloError(
        f"{path}: neither a checkpoint (no {INDEX_NAME} there) nor a run folder (no train/checkpoints); see "
        "`kielo checkpoint list RUN`"
    )


def _tokenizer_folder(checkpoint: Path, given: str | None) -> Path:
    """Returns the folder that is named, or that of the run in whose folder the checkpoint is."""
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
    from kielo.artifact.manifest import read_manifest

    manifest = read_manifest(to)
    return {
        "folder": str(to),
        "checkpoint": str(checkpoint),
        "dtype": manifest.section["dtype"],
        "wall_seconds": manifest.wall_seconds,
        **manifest.counts,
        "bytes": {name: record["bytes"] for name, record in manifest.files.items()},
    }
