"""`kielo generate`: what a model writes after a prompt, or an encoder puts in the place of its mask token."""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kielo.artifact.manifest import read_manifest
from kielo.cli.flags import examples
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_table
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.recipe.sections import Recipe
from kielo.stages import late, results


def generate_flags(parser: argparse.ArgumentParser) -> None:
    examples(
        parser, 'kielo generate demo_estonian "Dokumendi salvestamiseks"',
        'kielo generate runs/demo_estonian/hf "Kord oli" --temperature 0',
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help="a recipe, a run folder or a Hugging Face folder")
    parser.add_argument(
        "prompt", metavar="PROMPT", help="the beginning of the text; for an encoder, text with one [MASK]"
    )
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="write at most so many; default: 200"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T",
        help="0: the likeliest token each time; default: 0.8",
    )  # fmt: skip
    parser.add_argument(
        "--top-k", type=int, default=50, metavar="K", help="draw among the K likeliest tokens; default: 50"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the draws; default: 1")
    parser.add_argument("--json", action="store_true", help="print prompt and text as JSON when it is whole")


def generate(options: argparse.Namespace) -> None:
    for flag, value, least in (("--tokens", options.tokens, 1), ("--top-k", options.top_k, 1)):
        if value < least:
            raise KieloError(f"{flag} {value}: give {least} or more")
    if not 0 <= options.seed < 1 << 32:
        raise KieloError(f"--seed {options.seed}: give a number from 0 to {(1 << 32) - 1}")
    if any("\ud800" <= one <= "\udfff" for one in options.prompt):
        raise KieloError("PROMPT is not UTF-8; convert it, or set the terminal's locale to UTF-8")
    if not 0 <= options.temperature < 100:
        raise KieloError(f"--temperature {options.temperature:g}: give a number from 0 to 100; 0.8 is usual")
    if not (Path(options.model) / "config.json").is_file():
        recipe = read_recipe(options.model).recipe
        if recipe.train.objective == "masked_tokens":
            return _fill(recipe, options)
    with keep_stdout_for_json(options.json), _hugging_face_folder(options) as folder:
        sampling = late.Sampling(options.tokens, options.temperature, options.top_k, options.seed)
        if not options.json:
            print(options.prompt, end="", flush=True)
        text = late.continue_text(folder, options.prompt, sampling, prints=not options.json)
    if options.json:
        print_json({"prompt": options.prompt, "text": text})


def _fill(recipe: Recipe, options: argparse.Namespace) -> None:
    """Print the likeliest tokens in the place of the mask token, by the newest checkpoint of a run."""
    folder = run_folder(recipe)
    checkpoint = results.newest_checkpoint(folder)
    print(f"the model is {checkpoint}", file=sys.stderr)
    (filled,) = late.fill_prompts(late.load_encoder(recipe, folder, checkpoint), [options.prompt])
    if options.json:
        return print_json({"prompt": options.prompt, "fillings": [one.content() for one in filled.fillings]})
    rows = [(one.text, f"{100 * one.probability:.1f} %") for one in filled.fillings]
    print_table(["token", "probability"], rows)


@contextmanager
def _hugging_face_folder(options: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder itself, the export of a finished run, or one made now of its newest checkpoint."""
    if (Path(options.model) / "config.json").is_file():
        yield Path(options.model)
        return
    folder = run_folder(read_recipe(options.model).recipe)
    if read_manifest(folder / "hf") is not None:
        print(f"the model is {folder / 'hf'}", file=sys.stderr)  # the run may have been trained on since
        yield folder / "hf"
        return
    checkpoint = results.newest_checkpoint(folder)
    print(f"the model is {checkpoint}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="kielo-") as place:
        results.export_checkpoint(checkpoint, Path(place) / "hf", folder / "tokenizer", None)
        yield Path(place) / "hf"
