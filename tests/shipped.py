"""The shipped recipes as runs: a name for each, RECIPE_VARIANT of a recipe of variants."""

from kielo.recipe.cards import accelerator, cluster
from kielo.recipe.read import read_first_language, recipe_choices, shipped_recipes
from kielo.recipe.sections import Recipe


def _runs(name: str) -> list[str]:
    choices = recipe_choices(name)
    variants = [choice.removeprefix("variant=") for choice in choices if choice.startswith("variant=")]
    return [f"{name}_{variant}" for variant in variants] or [name]


RUNS = [run for name in shipped_recipes() for run in _runs(name)]


def on_accelerators(name: str) -> Recipe | None:
    """Return the recipe if it is meant for a cluster of GPUs."""
    recipe = read_first_language(name).recipe
    return recipe if accelerator(cluster(recipe.cluster).accelerator).device == "cuda" else None


ON_ACCELERATORS = [name for name in RUNS if on_accelerators(name)]
