"""`kielo plan --budget`: the size and the tokens that scaling laws advise for a compute budget. No torch."""

import argparse
from dataclasses import asdict

from kielo.cli.ideas import STAND_INS
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.plan.idea import USUAL_MFU, flops_of_device_hours
from kielo.plan.scaling_laws import Row, advise
from kielo.recipe.amounts import parse_amount, parse_device_hours, short_amount
from kielo.recipe.cards import accelerator, cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.recipe.sections import Dataset, Recipe
from kielo.resolve.mixture_table import mixture_table

_OF_LAYOUTS = ("nodes", "top", "wide", "all", "plot", "wall_hours")  # flags without a meaning for a law
_LEAST_FLOPS = 1e12


def plan_budget(options: argparse.Namespace) -> int:
    """Print the table. Exit code 1: training would refuse the recipe's own number of tokens."""
    if options.budget is None:
        raise KieloError("--corpus needs --budget. Fix: --budget 20000h --corpus 6.6B")
    for flag in _OF_LAYOUTS:
        if getattr(options, flag):
            name = f"--{flag.replace('_', '-')}"
            raise KieloError(
                f"{name} is about layouts, and --budget about scaling laws. Fix: only one of them"
            )
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
        "Loss in nats a token of English web text, for training from scratch. Compare it only between rows "
        "of one law, and for one tokenizer. Chinchilla: the fit of Besiroglu et al. 2024. Repetition: "
        "Muennighoff et al. 2023."
    )
    if advice.complaints:
        raise KieloError(f"training would refuse this: {'; '.join(advice.complaints)}")
    return 0


def _recipe(options: argparse.Namespace) -> Recipe | None:
    given = {"cluster": options.cluster, "machine": options.machine, "model.params": options.params}
    sets = [*options.sets, *(f'{key}="{value}"' for key, value in given.items() if value)]
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
    return flops, (
        f"{hours:,} device-hours of {site.name} at {USUAL_MFU:.0%} of {peak:g} TFLOP/s: {flops:.3g} FLOPs"
    )


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


def _cells(row: Row) -> tuple[str, ...]:
    sizes = (short_amount(round(size)) for size in (row.choice.parameters, row.choice.tokens))
    return row.what, *sizes, f"{row.choice.epochs:.2f}", f"{row.choice.loss:.3f}", row.law


def _json(row: Row) -> dict[str, object]:
    computed = {"epochs": row.choice.epochs, "flops": row.choice.flops}
    return {"what": row.what, "law": row.law} | asdict(row.choice) | computed
