"""`kielo plan data`: the text of a run by source and phase, before anything is trained. No torch."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from kielo.cli.flags import VerbParser, examples, takes_recipe
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.recipe.amounts import short_amount
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.report.units import format_bytes
from kielo.resolve.mixture_table import MixtureTable, mixture_table

_LONGEST_NAME = 16  # characters; longer names of sources are cut, for a table of 80 columns


def data_flags(parser: VerbParser) -> None:
    names = ("demo_estonian", "poro_34b --set dataset.temperature=3.3", "runs/demo_estonian --json")
    examples(parser, *(f"kielo plan data {name}" for name in names))
    takes_recipe(parser)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON, in tokens and bytes")


def data(options: argparse.Namespace) -> int:
    """Print the tables. Exit code 1: training would refuse the text."""
    recipe = read_recipe(options.recipe, options.sets).recipe
    table = mixture_table(recipe, run_folder(recipe))
    if options.json:
        print_json(asdict(table))
        return 1 if table.complaints else 0
    print_text(f"{'Estimated from' if table.is_estimate else 'Counted in'} the {table.origin}.\n")
    for titles, rows in _tables(table):
        print_table(titles, rows)
        print()
    print_text(
        "worth: the number of different tokens that would teach as much as these repeated tokens "
        "(Muennighoff et al. 2023)."
    )
    if table.complaints:
        lines = "\n".join(f"  - {complaint}" for complaint in table.complaints)
        raise KieloError(f"training would refuse {len(table.complaints)} of this:\n{lines}")
    return 0


def _tables(table: MixtureTable) -> Iterator[tuple[tuple[str, ...], list[tuple[Any, ...]]]]:
    has_mask = any(row.amount.tokens_with_loss is not None for row in table.sources)
    with_loss = ("with loss",) if has_mask else ()
    yield (
        ("source", "documents", "bytes", "words", "tokens", *with_loss, "tok/word", "epochs", "worth"),
        [
            (
                *(_name(row.source), _known(of.documents), _known(of.bytes, format_bytes), _known(of.words)),
                *(_known(of.tokens), *([_known(of.tokens_with_loss or of.tokens)] if has_mask else [])),
                *("–" if of.tokens_per_word is None else f"{of.tokens_per_word:.2f}", f"{row.epochs:.2f}"),
                _known(row.effective_tokens),
            )
            for row, of in ((row, row.amount) for row in table.sources)
        ],
    )
    yield (
        ("phase", "source", "share of a step", "sequences of a step", "tokens", "epochs"),
        [
            (
                *(row.phase, _name(row.source), f"{row.share:.2%}", f"{row.sequences_per_step:.2f}"),
                *(_known(row.tokens), f"{row.epochs:.2f}"),
            )
            for row in table.phases
        ],
    )
    if table.packing:
        yield (
            ("best-fit packed", "sequence", "sequences", "documents cut", "in one stream", "filling"),
            [
                (
                    *(_name(row.source), f"{row.sequence_length:,}", _known(row.sequences)),
                    *(f"{row.cut:.2%}", f"{row.cut_in_one_stream:.2%}", f"{row.filling:.3%}"),
                )
                for row in table.packing
            ],
        )


def _name(source: str) -> str:
    return source if len(source) <= _LONGEST_NAME else source[: _LONGEST_NAME - 1] + "~"


def _known(number: float | None, as_text: Callable[[float], str] = short_amount) -> str:
    return "–" if number is None else as_text(number)
