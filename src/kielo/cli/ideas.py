"""Recipes of `kielo plan` and `kielo rehearse`: an idea needs no text, no name and no token budget."""

import argparse
import sys
from collections.abc import Collection
from typing import Any

from kielo.plan.idea import with_usual_training
from kielo.recipe.cards import Cluster
from kielo.recipe.errors import KieloError, print_text
from kielo.recipe.read import NOT_GIVEN, read_recipe
from kielo.recipe.sections import Recipe

# Values that no plan needs, for a recipe without them.
STAND_INS: dict[str, Any] = {"name": "idea", "language": "en", "corpus": {"sources": ["text"]}}


TAKES_IDEA = """
    [RECIPE]
    --params SIZE  size of the model, such as 3B, in the usual proportions; enough without RECIPE
"""


def with_flags(options: argparse.Namespace, **keys: str | None) -> list[str]:
    """Return the recipe's changes by --set, and by flags whose values are `keys`."""
    given = {key: value for key, value in keys.items() if value is not None}
    if empty := [key for key, value in given.items() if not value.strip()]:
        raise KieloError(f"--{empty[0]} is empty. Fix: give its value, or leave --{empty[0]} out")
    return [*options.sets, *(f'{key}="{value}"' for key, value in given.items())]


def read_idea(options: argparse.Namespace, **keys: str | None) -> Recipe:
    """Read RECIPE, which may be a [model] alone, with --set, --params and `keys`.

    Also say on stderr which values were filled in. Raise KieloError if nothing was given.
    """
    params, sets = getattr(options, "params", None), with_flags(options, **keys)
    if params is not None:
        if not params.strip():
            raise KieloError(f"--params {params!r}: give a number of parameters, such as 350M or 3B")
        sets.append(f"model.params={params}")
    if options.recipe is None and not sets:
        raise KieloError(
            "no recipe and no size. Fix: a recipe (see `kielo recipes`), or --params 3B --cluster lumi_g"
        )
    read = read_recipe(options.recipe, sets, STAND_INS, lambda idea: with_usual_training(idea, True)[0])
    recipe, lines = with_usual_training(read.recipe, NOT_GIVEN in read.origins.values())
    for line in lines:
        print_text(line, sys.stderr)
    return recipe


def check_nodes(given: int | str, numbers: Collection[int], site: Cluster) -> None:
    """Refuse numbers of nodes that the site does not have. `given` is the value of --nodes."""
    for number in (min(numbers), max(numbers)):
        if not 1 <= number <= site.nodes:
            near = min(max(number, 1), site.nodes)
            raise KieloError(f"--nodes {given}: {site.name} has 1 to {site.nodes} nodes. Fix: {near}")
