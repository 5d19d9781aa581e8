"""Recipes of `kielo plan` and `kielo rehearse`: an idea needs no text, no name and no token budget."""

import argparse
from typing import Any

from kielo.cli.flags import VerbParser, takes_recipe
from kielo.plan.idea import with_usual_training
from kielo.recipe.errors import KieloError
from kielo.recipe.read import NOT_GIVEN, read_recipe
from kielo.recipe.sections import Recipe

# Values that no plan needs, for a recipe without them.
STAND_INS: dict[str, Any] = {"name": "idea", "language": "en", "corpus": {"sources": ["text"]}}


def takes_idea(parser: VerbParser) -> None:
    """Declare an optional RECIPE, and the flags that change it."""
    takes_recipe(parser, nargs="?")
    parser.takes("""
        --params SIZE  size of the model, such as 3B, in the usual proportions; enough without RECIPE
    """)


def read_idea(options: argparse.Namespace, **keys: str | None) -> tuple[Recipe, list[str]]:
    """Read RECIPE, which may be a [model] alone, with --set, --params and `keys`.

    Also return lines on the values that were filled in. Raise KieloError if nothing was given.
    """
    params = getattr(options, "params", None)
    sets = [*options.sets, *(f'{key}="{value}"' for key, value in keys.items() if value is not None)]
    if params is not None:
        if not params.strip():
            raise KieloError(f"--params {params!r}: give a number of parameters, such as 350M or 3B")
        sets.append(f"model.params={params}")
    if options.recipe is None and not sets:
        raise KieloError(
            "no recipe and no size. Fix: a recipe (see `kielo recipes`), or --params 3B --cluster lumi_g"
        )
    read = read_recipe(options.recipe, sets, STAND_INS)
    return with_usual_training(read.recipe, NOT_GIVEN in read.origins.values())
