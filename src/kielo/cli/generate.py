"""`kielo generate`: what a model writes after a prompt, or an encoder puts in the place of its mask token."""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kielo.artifact.manifest import read_manifest
from kielo.cli.flags import VerbParser, examples
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_table
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.recipe.sections import Recipe
from kielo.stages import late, results


def generate_flags(parser: VerbParser) -> None:
    examples(
        parser,
        'kielo generate demo_estonian "Dokumendi salvestamiseks"',
        'kielo generate runs/demo_estonian/hf "Kord oli" --temperature 0',
    )
    parser.add_argument("model", metavar="MODEL", help="a recipe, a run folder or a Hugging Face folder")
    parser.add_argument(
        "prompt", metavar="PROMPT", help="the beginning of the text; for an encoder, text with one [MASK]"
    )
    takes_sampling(parser)
    parser.add_argument("--json", action="store_true", help="print prompt and text as JSON at the end")


def takes_sampling(parser: VerbParser) -> None:
    parser.takes("""
        --tokens N:int=200        write at most N tokens; default: 200
        --temperature T:float=0.8  0: the likeliest token each time; default: 0.8
        --top-k K:int=50          draw among the K likeliest tokens; default: 50
        --seed SEED:int=1         seed of the draws; default: 1
    """)


def refuse_sampling(options: argparse.Namespace) -> None:
    for flag, value in (("--tokens", options.tokens), ("--top-k", options.top_k)):
        if value < 1:
            raise KieloError(f"{flag} {value}: give 1 or more")
    if not 0 <= options.seed < 1 << 32:
        raise KieloError(f"--seed {options.seed}: give a number from 0 to {(1 << 32) - 1}")
    if not 0 <= options.temperature < 100:
        raise KieloError(f"--temperature {options.temperature:g}: give a number from 0 to 100; 0.8 is usual")


def encoder_recipe(model: str) -> Recipe | None:
    """Return the recipe of a run whose model is an encoder, None for a decoder or a Hugging Face folder."""
    if (Path(model) / "config.json").is_file():
        return None
    recipe = read_recipe(model).recipe
    return recipe if recipe.train.objective == "masked_tokens" else None


def generate(options: argparse.Namespace) -> None:
    refuse_sampling(options)
    if any("\ud800" <= letter <= "\udfff" for letter in options.prompt):
        raise KieloError("PROMPT is not UTF-8; convert it, or set the terminal's locale to UTF-8")
    if recipe := encoder_recipe(options.model):
        return _fill(recipe, options)
    with keep_stdout_for_json(options.json), hugging_face_folder(options.model) as folder:
        sampling = late.Sampling(options.tokens, options.temperature, options.top_k, options.seed)
        if not options.json:
            print(options.prompt, end="", flush=True)
        text = late.continue_text(folder, options.prompt, sampling, prints=not options.json)
    if options.json:
        print_json({"prompt": options.prompt, "text": text})
    return None


def _fill(recipe: Recipe, options: argparse.Namespace) -> None:
    folder = run_folder(recipe)
    checkpoint = results.newest_checkpoint(folder)
    print(f"the model is {checkpoint}", file=sys.stderr)
    (filled,) = late.fill_prompts(late.load_encoder(recipe, folder, checkpoint), [options.prompt])
    if options.json:
        return print_json({"prompt": options.prompt, "fillings": [one.content() for one in filled.fillings]})
    rows = [(one.text, f"{100 * one.probability:.1f} %") for one in filled.fillings]
    print_table(["token", "probability"], rows)


@contextmanager
def hugging_face_folder(model: str) -> Iterator[Path]:
    """Yield the folder itself, the export of a finished run, or a new export of its newest checkpoint."""
    if (Path(model) / "config.json").is_file():
        yield Path(model)
        return
    folder = run_folder(read_recipe(model).recipe)
    if read_manifest(folder / "hf") is not None:
        print(f"the model is {folder / 'hf'}", file=sys.stderr)  # an older model, if the run trained further
        yield folder / "hf"
        return
    with exported(folder, results.newest_checkpoint(folder)) as made:
        yield made


@contextmanager
def exported(run: Path, checkpoint: Path) -> Iterator[Path]:
    """Yield an export of the checkpoint of a run, in a folder that is removed after the block."""
    print(f"the model is {checkpoint}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="kielo-") as place:
        results.export_checkpoint(checkpoint, Path(place) / "hf", run / "tokenizer", None)
        yield Path(place) / "hf"
