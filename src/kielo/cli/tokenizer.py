"""`kielo tokenizer`: figures of tokenizers on a text, what each would cost a model, and maps. No torch."""

import argparse
import math
from pathlib import Path
from typing import Any

from kielo.cli.flags import VerbParser, takes
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.cli.vocabulary_choice import advise, choice_json, choice_rows, in_words
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.tokenizer.load import TOKENIZER_FILE, load_tokenizer
from kielo.tokenizer.make_row_map import example_ids, make_row_map, row_in_words, row_map_in_words
from kielo.tokenizer.measure import measure as figures_of
from kielo.tokenizer.measure import parity
from kielo.tokenizer.spelling import TokenNames
from kielo.tokenizer.train import texts_to_measure

# Figure → (its row of the table, its format).
_ROWS = {
    "vocabulary_size": ("tokens in the vocabulary", "{:,}"),
    "tokens_per_word": ("tokens a word", "{:.3f}"),
    "bytes_per_token": ("bytes a token", "{:.3f}"),
    "characters_per_token": ("characters a token", "{:.3f}"),
    "parity": ("parity with English", "{:.3f}"),
    "f95": ("F95", "{:,}"),
    "renyi_efficiency": ("Rényi efficiency (α 2.5)", "{:.3f}"),
    "shannon_efficiency": ("Shannon efficiency", "{:.3f}"),
    "vocabulary_used_share": ("vocabulary used", "{:.1%}"),
    "single_byte_token_share": ("tokens that are one byte", "{:.1%}"),
    "exact_round_trip_share": ("exact round trips", ""),
    "embedding_share": ("share of embedding, head", "{:.1%}"),
    "tokens": ("tokens of the text", "{:,}"),
    "words": ("words", "{:,}"),
    "bytes": ("bytes", "{:,}"),
    "texts": ("texts", "{:,}"),
}


SUBVERBS = {
    "measure": ("tokenizer:measure", "figures on a text; whether to keep, extend or replace a vocabulary"),
    "map": ("tokenizer:row_map", "the old tokens whose rows a transplanted vocabulary is made of"),
}


def tokenizer_flags(parser: VerbParser) -> None:
    parser.takes("$ kielo tokenizer measure A B --text file.txt")
    parser.has_subverbs("subverb", SUBVERBS)


@takes("""
    $ kielo tokenizer map runs/english/tokenizer runs/demo_estonian/tokenizer
    OLD                  folder of the weights' tokenizer
    NEW                  folder of the tokenizer for the new model
    --vectors FILE       vectors, as model.transplant_vectors, to weigh old rows by similarity (FOCUS)
    --examples N:int=20  number of new tokens to show; default: 20
    --json               print JSON
""")
def row_map(options: argparse.Namespace) -> None:
    if options.examples < 0:
        raise KieloError(f"--examples {options.examples}: give 0 or more")
    old, new = (load_tokenizer(tokenizer_folder(Path(folder))) for folder in (options.old, options.new))
    vectors = Path(options.vectors) if options.vectors else None
    made = make_row_map(old, new, "focus" if vectors else "mean", vectors)
    if options.json:
        return print_json(made.content())
    print_text(row_map_in_words(made))
    if made.control_tokens:
        print_table(["control token", "row of"], sorted(made.control_tokens.items()))
    ids, old_names, new_names = example_ids(made, options.examples), TokenNames(old), TokenNames(new)
    rows = [(new_names(new_id), row_in_words(made, new_id, old_names)) for new_id in ids]
    print_table(["new token", "old tokens"], rows)


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder. Raise KieloError for a run folder, which has its tokenizer in a folder below."""
    if not (folder / TOKENIZER_FILE).is_file() and (folder / "tokenizer" / TOKENIZER_FILE).is_file():
        raise KieloError(f"{folder}: a run folder. Fix: {folder / 'tokenizer'}")
    return folder


@takes("""
    $ kielo tokenizer measure runs/demo_estonian/tokenizer --text file.txt
    $ kielo tokenizer measure A B --heldout runs/demo_estonian --parallel et.txt en.txt
    $ kielo tokenizer measure OLD NEW --text et.txt --model estonian_llama31_70b --nodes 16
    DIR... as tokenizers     folders with a tokenizer.json; with --model, the model's own tokenizer first
    --text FILE              plain text, one document a line
    --heldout RUN            held-out documents of a run, in place of --text
    --parallel FILE ENGLISH  plain text, and its English translation line for line, for parity
    --model MODEL            recipe, run, or folder with a Hugging Face config.json: shows the embedding's
                             share, and with several tokenizers whether to keep, extend or replace the first
    --bytes N                amount of training text of --model, such as 40GB; default: its recipe's
    --relearn TOKENS         tokens to train new rows with a frozen body; default: the recipe's phases for it,
                             or 81,920 a row
    --cluster CLUSTER        cluster card, for device-hours; default: the recipe's
    --nodes N:int            number of nodes; default: the first of the recipe's nodes
    --json                   print JSON
""")
def measure(options: argparse.Namespace) -> None:
    _check_flags(options)
    names = list(dict.fromkeys(options.tokenizers))
    pairs = _parallel(*options.parallel) if options.parallel else None
    source, texts = _texts(options, pairs)
    tokenizers = {name: load_tokenizer(tokenizer_folder(Path(name))) for name in names}
    figures = {}
    for name, tokenizer in tokenizers.items():
        figures[name] = figures_of(tokenizer, texts) | (parity(tokenizer, *pairs) if pairs else {})
    advice = None
    if options.model:
        advice = advise(options, tokenizers, figures)
    words = [in_words(advice)] if advice else []
    if options.json:
        choices = [choice_json(one) for one in advice.choices] if advice else []
        return print_json({"measured_on": source, "tokenizers": figures, "choices": choices, "advice": words})
    print_text(f"on {source}")
    shown = [key for key in _ROWS if any(key in of for of in figures.values())]
    rows = [(_ROWS[key][0], *(_cell(key, of[key]) for of in figures.values())) for key in shown]
    print_table(["", *names], rows)
    if advice:
        print_table(*choice_rows(advice))
    for line in words:
        print_text(line)
    if options.model and len(names) > 1 and advice is None:
        print_text(
            "To decide whether to keep, extend or replace the first, give the training text: --bytes 40GB"
        )


def _check_flags(options: argparse.Namespace) -> None:
    if options.text and options.heldout:
        raise KieloError("--text and --heldout are two texts. Fix: one of them")
    if not (options.text or options.heldout or options.parallel):
        raise KieloError("no text to measure on. Fix: --text FILE, --heldout RUN or --parallel FILE ENGLISH")
    for flag in ("bytes", "relearn", "cluster", "nodes"):
        if getattr(options, flag) is not None and not options.model:
            raise KieloError(f"--{flag} is about a model. Fix: --model MODEL too")


def _texts(options: argparse.Namespace, pairs: tuple[list[str], list[str]] | None) -> tuple[str, list[str]]:
    if options.text:
        return options.text, [line for line in _lines("--text", options.text) if line]
    if pairs and not options.heldout:
        return options.parallel[0], [line for line in pairs[0] if line]
    recipe = read_recipe(options.heldout).recipe
    folder = run_folder(recipe)
    if not (folder / "corpus" / "documents").is_dir():
        raise KieloError(
            f"--heldout {options.heldout}: no documents in {folder / 'corpus'}. Fix: --text FILE"
        )
    what, texts = texts_to_measure(recipe, folder / "corpus")
    return f"{what} of {folder}", texts


def _lines(flag: str, name: str) -> list[str]:
    """Return the lines of a file, without an empty line at its end."""
    path = Path(name)
    if not path.is_file():
        raise KieloError(f"{flag} {path}: no such file. Fix: a plain text file, one document a line")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise KieloError(
            f"{flag} {path}: byte {error.start} is not UTF-8. Fix: convert it with iconv"
        ) from None
    lines = [line.removesuffix("\r") for line in lines]
    if not any(line.strip() for line in lines):
        raise KieloError(f"{flag} {path}: no text in it. Fix: a plain text file, one document a line")
    return lines[:-1] if not lines[-1] else lines


def _parallel(name: str, english: str) -> tuple[list[str], list[str]]:
    ours, theirs = (_lines("--parallel", one) for one in (name, english))
    if len(ours) != len(theirs):
        raise KieloError(
            f"--parallel: {name} has {len(ours):,} lines and {english} {len(theirs):,}. Fix: files in which "
            "each line translates the same line of the other file"
        )
    return ours, theirs


def _cell(key: str, value: Any) -> str:
    if key == "exact_round_trip_share":  # rounded down: 100 % means all
        return f"{math.floor(value * 1e4) / 100:g}%"
    return _ROWS[key][1].format(value)
