"""`kielo tokenizer measure`: figures of tokenizers on a text, and what each would cost a model. No torch."""

import argparse
import math
from pathlib import Path
from typing import Any

from kielo.cli.flags import examples
from kielo.cli.look import tokenizer_folder
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.recipe.errors import KieloError

# Figure → (its row of the table, how it is written).
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


def measure_flags(parser: argparse.ArgumentParser) -> None:
    examples(
        parser, "kielo tokenizer measure runs/demo_estonian/tokenizer --text file.txt",
        "kielo tokenizer measure A B --heldout runs/demo_estonian --parallel et.txt en.txt",
        "kielo tokenizer measure OLD NEW --text et.txt --model estonian_llama31_70b --nodes 16",
    )  # fmt: skip
    parser.add_argument(
        "tokenizers",
        nargs="+",
        metavar="DIR",
        help="folders with a tokenizer.json; with --model the first is the model's own",
    )
    parser.add_argument("--text", metavar="FILE", help="plain text, one document a line")
    parser.add_argument("--heldout", metavar="RUN", help="held-out documents of a run, in place of --text")
    parser.add_argument(
        "--parallel",
        nargs=2,
        metavar=("FILE", "ENGLISH"),
        help="plain text, and line for line its English translation, for parity",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a recipe, a run, or a folder with Hugging Face's config.json: the embedding's share in it; "
        "with several tokenizers: keep the first, extend or replace it",
    )
    parser.add_argument(
        "--bytes", metavar="N", help="text that --model is to train on, such as 40GB; default: its recipe's"
    )
    parser.add_argument(
        "--relearn",
        metavar="TOKENS",
        help="to learn new rows with a frozen body; default: the recipe's phases for it, or 81,920 a row",
    )
    parser.add_argument("--cluster", help="cluster card, for device-hours; default: the recipe's")
    parser.add_argument("--nodes", type=int, metavar="N", help="of the cluster; default: the recipe's first")
    parser.add_argument("--json", action="store_true")


def measure(options: argparse.Namespace) -> None:
    from kielo.tokenizer.load import load_tokenizer
    from kielo.tokenizer.measure import measure, parity

    _check_flags(options)
    names = list(dict.fromkeys(options.tokenizers))
    pairs = _parallel(*options.parallel) if options.parallel else None
    source, texts = _texts(options, pairs)
    tokenizers = {name: load_tokenizer(tokenizer_folder(Path(name))) for name in names}
    figures = {}
    for name, tokenizer in tokenizers.items():
        figures[name] = measure(tokenizer, texts) | (parity(tokenizer, *pairs) if pairs else {})
    advice = None
    if options.model:
        from kielo.cli.vocabulary_choice import advise, choice_json, choice_rows, in_words

        advice = advise(options, tokenizers, figures)
    words = [in_words(advice)] if advice else []
    if options.json:
        choices = [choice_json(one) for one in advice.choices] if advice else []
        return print_json({"measured_on": source, "tokenizers": figures, "choices": choices, "advice": words})
    print_text(f"on {source}")
    shown = [key for key in _ROWS if any(key in of for of in figures.values())]
    print_table(
        ["", *names], [(_ROWS[key][0], *(_cell(key, of[key]) for of in figures.values())) for key in shown]
    )
    if advice:
        print_table(*choice_rows(advice))
    for line in words:
        print_text(line)
    if options.model and len(names) > 1 and advice is None:
        print_text("With --bytes 40GB, text to train on: whether to keep the first, to extend or replace it.")


def _check_flags(options: argparse.Namespace) -> None:
    if options.text and options.heldout:
        raise KieloError("--text and --heldout are two texts to measure on; give one of them")
    if not (options.text or options.heldout or options.parallel):
        raise KieloError(
            "no text to measure on; give --text FILE, --heldout RUN or --parallel FILE ENGLISH; see kielo "
            "tokenizer measure --help"
        )
    for flag in ("bytes", "relearn", "cluster", "nodes"):
        if getattr(options, flag) is not None and not options.model:
            raise KieloError(f"--{flag} is of the model that a tokenizer is for; give --model MODEL too")


def _texts(options: argparse.Namespace, pairs: tuple[list[str], list[str]] | None) -> tuple[str, list[str]]:
    """Returns what is measured on, in words, and its texts."""
    if options.text:
        return options.text, [line for line in _lines("--text", options.text) if line]
    if not options.heldout:
        return options.parallel[0], [line for line in pairs[0] if line]
    from kielo.recipe.read import read_recipe, run_folder
    from kielo.tokenizer.train import texts_to_measure

    recipe = read_recipe(options.heldout).recipe
    folder = run_folder(recipe)
    if not (folder / "corpus" / "documents").is_dir():
        raise KieloError(
            f"--heldout {options.heldout}: no documents in {folder / 'corpus'}; give --text FILE"
        )
    what, texts = texts_to_measure(recipe, folder / "corpus")
    return f"{what} of {folder}", texts


def _lines(flag: str, name: str) -> list[str]:
    """Returns the lines of a file; a last one without text is none."""
    path = Path(name)
    if not path.is_file():
        raise KieloError(f"{flag} {path}: no such file; give a plain text file, one document a line")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise KieloError(
            f"{flag} {path}: byte {error.start} is not UTF-8; convert it with iconv first"
        ) from None
    lines = [line.removesuffix("\r") for line in lines]
    if not any(line.strip() for line in lines):
        raise KieloError(f"{flag} {path}: no text in it; give a plain text file, one document a line")
    return lines[:-1] if not lines[-1] else lines


def _parallel(name: str, english: str) -> tuple[list[str], list[str]]:
    ours, theirs = (_lines("--parallel", one) for one in (name, english))
    if len(ours) != len(theirs):
        raise KieloError(
            f"--parallel: {name} has {len(ours):,} lines and {english} {len(theirs):,}; give files in which "
            "each line is the translation of the same line of the other"
        )
    return ours, theirs


def _cell(key: str, value: Any) -> str:
    if key == "exact_round_trip_share":  # 100 % says that all do
        return f"{math.floor(value * 1e4) / 100:g}%"
    return _ROWS[key][1].format(value)
