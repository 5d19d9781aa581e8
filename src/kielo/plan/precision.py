"""Precision of a run for plans: that of most steps, and its name in the planner's columns; no torch."""

from kielo.recipe.phases import steps_of_run
from kielo.recipe.sections import Fp8, Precision, Recipe


def steps_by_precision(recipe: Recipe) -> dict[Precision, int]:
    """Returns precision → steps that the recipe asks for in it, skipped ones included."""
    after = 1 + (steps_of_run(recipe) or 1)  # of a run whose length is not known yet, one step
    begins = [
        (1, recipe.train.precision),
        *sorted(recipe.train.precision_changes),
        (after, recipe.train.precision),
    ]
    steps: dict[Precision, int] = {}
    for (first, precision), (following, _) in zip(begins, begins[1:]):
        steps[precision] = steps.get(precision, 0) + max(0, min(following, after) - first)
    return steps


def main_precision(recipe: Recipe) -> Precision:
    """Returns the precision of most steps; of two with equally many, the earlier one."""
    steps = steps_by_precision(recipe)
    return max(steps, key=steps.get)


def matrix_recipe(precision: Precision, fp8: Fp8) -> str:
    """Returns the entry of `workload.RECIPES` for the layers' matrix products."""
    if precision != "fp8":
        return "bf16"
    return "fp8" if fp8.scaling == "tensorwise" else "fp8_rowwise"
