"""`kielo plan data` and `kielo plan --budget`: tokens before anything is trained. No torch.

They are the tokens that a run's text has, and the tokens that scaling laws advise for a compute budget.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from kielo.cli.flags import takes
from kielo.cli.ideas import STAND_INS, with_flags
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.plan.idea import USUAL_MFU, flops_of_device_hours
from kielo.plan.scaling_laws import advise
from kielo.recipe.amounts import parse_amount, parse_device_hours, short_amount
from kielo.recipe.cards import accelerator, cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.recipe.sections import Dataset, Recipe
from kielo.report.units import format_bytes
from kielo.resolve.mixture_table import MixtureTable, mixture_table

_LONGEST_NAME = 16  # characters; longer names of sources are cut, for a table of 80 columns


@takes("""
    $ kielo plan data demo_estonian
    $ kielo plan data poro_34b --set dataset.temperature=3.3
    $ kielo plan data runs/demo_estonian --json
    RECIPE
    --json  print all figures as JSON, in tokens and bytes
""")
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


_OF_LAYOUTS = ("nodes", "top", "wide", "all", "plot", "wall_hours")  # flags without a meaning for a law
_LEAST_FLOPS = 1e12


def plan_budget(options: argparse.Namespace) -> int:
    """Print the table. Exit code 1: training would refuse the recipe's own number of tokens."""
    if options.budget is None:
        raise KieloError("--corpus needs --budget. Fix: --budget 20000h --corpus 6.6B")
    for flag in _OF_LAYOUTS:
        if getattr(options, flag):
            name = f"--{flag.replace('_', '-')}"
            raise KieloError(f"{name} is about layouts, and --budget about scaling laws. Fix: one of them")
    recipe = _recipe(options)
    flops, said = _flops(options.budget, recipe)
    unique = _unique_tokens(options.corpus, recipe)
    max_epochs = (recipe.dataset if recipe else Dataset()).max_epochs
    has_size = bool(options.recipe or options.params)
    advice = advise(flops, unique, max_epochs, recipe if has_size else None)
    if options.json:
        computed = {"flops": flops, "unique_tokens": unique, "max_epochs": max_epochs}
        said_too = {"advice": advice.sentences, "complaints": advice.complaints}
        choices = [
            {"what": row.what, "law": row.law}
            | asdict(row.choice)
            | {"epochs": row.choice.epochs, "flops": row.choice.flops}
            for row in advice.rows
        ]
        print_json(computed | {"choices": choices} | said_too)
        return 1 if advice.complaints else 0
    print_text(f"{said}, and a text of {short_amount(unique)} different tokens.\n")
    titles = ("", "parameters", "tokens", "epochs", "expected loss", "by the law of")
    rows = []
    for row in advice.rows:
        sizes = (short_amount(round(size)) for size in (row.choice.parameters, row.choice.tokens))
        rows.append((row.what, *sizes, f"{row.choice.epochs:.2f}", f"{row.choice.loss:.3f}", row.law))
    print_table(titles, rows)
    print()
    for sentence in advice.sentences:
        print_text(sentence)
    print_text(
        "Loss in nats a token of English web text, for training from scratch. Compare it only between rows "
        "of one law, and for one tokenizer. Chinchilla: the fit of Besiroglu et al. 2024. Repetition: "
        "Muennighoff et al. 2023."
    )
    if advice.complaints:
        raise KieloError(f"training would refuse this: {'; '.join(advice.complaints)}")
    return 0


def _recipe(options: argparse.Namespace) -> Recipe | None:
    keys = {"cluster": options.cluster, "machine": options.machine, "model.params": options.params or None}
    sets = with_flags(options, **keys)
    if options.recipe is None and not sets:
        return None
    return read_recipe(options.recipe, sets, STAND_INS).recipe


def _flops(budget: str, recipe: Recipe | None) -> tuple[float, str]:
    refused = KieloError(
        f"--budget {budget!r} is not an amount of compute. Fix: device-hours, such as 20000h, or FLOPs, such "
        "as 1e22"
    )
    try:
        hours = parse_device_hours(budget)
        if hours is None:
            flops = float(budget.strip().removesuffix("FLOPs").replace("_", ""))
            if not _LEAST_FLOPS <= flops <= 1e30:
                raise refused
            return flops, f"{flops:.3g} FLOPs"
    except ValueError:
        raise refused from None
    if recipe is None or not recipe.model_fields_set & {"cluster", "machine"}:
        raise KieloError(
            "--budget in device-hours needs a cluster. Fix: --cluster lumi_g, or FLOPs, such as 1e22"
        )
    site = cluster(recipe.cluster)
    peak = accelerator(site.accelerator).peak_tflops.get("bf16")
    if peak is None:
        raise KieloError(f"no card has the peak speed of a device of {site.name}. Fix: FLOPs, such as 1e22")
    flops = flops_of_device_hours(hours, peak)
    if flops < _LEAST_FLOPS:
        raise refused
    said = f"{hours:,} device-hours of {site.name} at {USUAL_MFU:.0%} of {peak:g} TFLOP/s: {flops:.3g} FLOPs"
    return flops, said


def _unique_tokens(corpus: str | None, recipe: Recipe | None) -> int:
    fix = "Fix: the number of different tokens, as --corpus 6.6B"
    if corpus is not None:
        try:
            tokens = parse_amount(corpus)
        except ValueError:
            tokens = 0
        if tokens < 1:
            raise KieloError(f"--corpus {corpus!r} is not a number of tokens. {fix}")
        return tokens
    if recipe is None or recipe.corpus.sources[0].path == STAND_INS["corpus"]["sources"][0]:
        raise KieloError(f"--budget needs an amount of text. {fix}")
    try:
        table = mixture_table(recipe, run_folder(recipe))
    except KieloError as problem:
        raise KieloError(f"{problem}. Or {fix.removeprefix('Fix: ')}") from None
    return sum(row.amount.tokens for row in table.sources)
