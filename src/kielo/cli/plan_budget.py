"""`kielo plan --budget`: the size and the tokens that scaling laws advise for a compute budget. No torch."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from kielo.cli.ideas import STAND_INS
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.recipe.amounts import parse_amount, parse_device_hours, short_amount
from kielo.recipe.errors import KieloError

if TYPE_CHECKING:
    from kielo.plan.scaling_laws import Row
    from kielo.recipe.sections import Recipe

_OF_LAYOUTS = ("nodes", "top", "wide", "all", "plot", "wall_hours")  # flags that say nothing to a law
_LEAST_FLOPS = 1e12


def plan_budget(options: argparse.Namespace) -> int:
    """Print the table. Exit code 1 where training would refuse the recipe's own number of tokens."""
    from kielo.plan.scaling_laws import advise
    from kielo.recipe.sections import Dataset

    if options.budget is None:
        raise KieloError("--corpus is of --budget; give both, for example --budget 20000h --corpus 6.6B")
    for flag in _OF_LAYOUTS:
        if getattr(options, flag):
            name = f"--{flag.replace('_', '-')}"
            raise KieloError(f"{name} is of layouts, and --budget of scaling laws; leave one of them out")
    recipe = _recipe(options)
    flops, said = _flops(options.budget, recipe)
    unique = _unique_tokens(options.corpus, recipe)
    max_epochs = (recipe.dataset if recipe else Dataset()).max_epochs
    has_size = bool(options.recipe or options.params)
    advice = advise(flops, unique, max_epochs, recipe if has_size else None)
    if options.json:
        computed = {"flops": flops, "unique_tokens": unique, "max_epochs": max_epochs}
        said_too = {"advice": advice.sentences, "complaints": advice.complaints}
        print_json(computed | {"choices": [_json(row) for row in advice.rows]} | said_too)
        return 1 if advice.complaints else 0
    print_text(f"{said}, and a text of {short_amount(unique)} different tokens.\n")
    titles = ("", "parameters", "tokens", "epochs", "expected loss", "by the law of")
    print_table(titles, [_cells(row) for row in advice.rows])
    print()
    for sentence in advice.sentences:
        print_text(sentence)
    print_text(
        "Loss in nats a token of English web text, of training from scratch: rows of one law compare with "
        "each other, not with those of the other law or with another tokenizer. Chinchilla: as Besiroglu et "
        "al. 2024 fitted it; repetition: Muennighoff et al. 2023."
    )
    if advice.complaints:
        raise KieloError(f"training would refuse this: {'; '.join(advice.complaints)}")
    return 0


def _recipe(options: argparse.Namespace) -> "Recipe | None":
    from kielo.recipe.read import read_recipe

    given = {"cluster": options.cluster, "machine": options.machine, "model.params": options.params}
    sets = [*options.sets, *(f'{key}="{value}"' for key, value in given.items() if value)]
    if options.recipe is None and not sets:
        return None
    return read_recipe(options.recipe, sets, STAND_INS).recipe


def _flops(budget: str, recipe: "Recipe | None") -> tuple[float, str]:
    from kielo.plan.idea import USUAL_MFU, flops_of_device_hours
    from kielo.recipe.cards import accelerator, cluster

    refused = KieloError(
        f"--budget {budget!r} is no amount of compute. Fix: device-hours, such as 20000h, or "
        "FLOPs, such as 1e22"
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
            "of which devices? Give --cluster too (see `kielo clusters`), or FLOPs, such as 1e22"
        )
    site = cluster(recipe.cluster)
    peak = accelerator(site.accelerator).peak_tflops.get("bf16")
    if peak is None:
        raise KieloError(f"no card says how fast a device of {site.name} is; give FLOPs, such as 1e22")
    flops = flops_of_device_hours(hours, peak)
    if flops < _LEAST_FLOPS:
        raise refused
    return flops, (
        f"{hours:,} device-hours of {site.name} at {USUAL_MFU:.0%} of {peak:g} TFLOP/s: {flops:.3g} FLOPs"
    )


def _unique_tokens(corpus: str | None, recipe: "Recipe | None") -> int:
    from kielo.recipe.read import run_folder
    from kielo.resolve.mixture_table import mixture_table

    works = "give the different tokens that there are: --corpus 6.6B"
    if corpus is not None:
        try:
            tokens = parse_amount(corpus)
        except ValueError:
            tokens = 0
        if tokens < 1:
            raise KieloError(f"--corpus {corpus!r} is no number of tokens; {works}")
        return tokens
    if recipe is None or recipe.corpus.sources[0].path == STAND_INS["corpus"]["sources"][0]:
        raise KieloError(f"of how much text? {works[0].upper()}{works[1:]}")
    try:
        table = mixture_table(recipe, run_folder(recipe))
    except KieloError as problem:
        raise KieloError(f"{problem}; or {works}") from None
    return sum(row.amount.tokens for row in table.sources)


def _cells(row: "Row") -> tuple[str, ...]:
    sizes = (short_amount(round(size)) for size in (row.choice.parameters, row.choice.tokens))
    return row.what, *sizes, f"{row.choice.epochs:.2f}", f"{row.choice.loss:.3f}", row.law


def _json(row: "Row") -> dict:
    computed = {"epochs": row.choice.epochs, "flops": row.choice.flops}
    return {"what": row.what, "law": row.law} | asdict(row.choice) | computed
