"""Recipes of `kielo plan` and `kielo rehearse`: an idea needs no text, no name and no token budget."""

import argparse
from typing import TYPE_CHECKING, Any

from kielo.recipe.errors import KieloError

if TYPE_CHECKING:  # `kielo plan --help` loads none of it
    from kielo.recipe.sections import Recipe

# In place of what no plan asks for. A recipe's own values come first.
STAND_INS: dict[str, Any] = {"name": "idea", "language": "en", "corpus": {"sources": ["text"]}}


def takes_idea(parser: argparse.ArgumentParser) -> None:
    """Declare RECIPE, which may be left out beside --params, and the flags that change it."""
    from kielo.cli.flags import takes_recipe

    takes_recipe(parser, nargs="?")
    parser.add_argument(
        "--params",
        metavar="SIZE",
        help="a model of this size, such as 3B, in the usual proportions; without RECIPE, of this alone",
    )


def read_idea(options: argparse.Namespace, **keys: str | None) -> tuple["Recipe", list[str]]:
    """Read RECIPE, which may be a [model] alone, with --set, --params and `keys`.

    Returns it and a line for people on what was filled in. Raises KieloError where nothing was given.
    """
    from kielo.plan.idea import with_usual_training
    from kielo.recipe.read import read_recipe

    params = getattr(options, "params", None)
    sets = [*options.sets, *(f'{key}="{value}"' for key, value in keys.items() if value is not None)]
    if params is not None:
        if not params.strip():
            raise KieloError(f"--params {params!r}: give a number of parameters, such as 350M or 3B")
        sets.append(f"model.params={params}")
    if options.recipe is None and not sets:
        raise KieloError(
            "of what? Give a recipe (see `kielo recipes`), or a size: --params 3B --cluster lumi_g"
        )
    return with_usual_training(read_recipe(options.recipe, sets, STAND_INS).recipe)
