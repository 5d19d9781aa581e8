"""Precision of a run for plans: that of most steps, and the share of a model that is in FP8; no torch."""

from math import prod

from kielo.models.parameter_shapes import parameter_shapes
from kielo.recipe.phases import full_phases
from kielo.recipe.sections import Fp8, Model, Precision, Recipe
from kielo.resolve.fp8_check import is_kept, layer_matrices
from kielo.resolve.phases import plan_phases


def steps_by_precision(recipe: Recipe) -> dict[Precision, int]:
    """Returns precision → steps that the recipe asks for in it, skipped ones included."""
    asked = full_phases(recipe)
    phases = plan_phases(asked, [{}] * len(asked), recipe.train.batch_ramp, recipe.seed, {})
    after = phases[-1].last_step + 1
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


def is_gathered_in_fp8(fp8: Fp8, device: str) -> bool:
    """Returns True if weights are gathered in 8 bits; on a processor FP8 is only emulated."""
    return fp8.gathered_in_fp8 and fp8.scaling == "tensorwise" and device == "cuda"


def fp8_share(model: Model, fp8: Fp8) -> float:
    """Returns the share of the layers' matrices in FP8, by weights, for a complete `model`.

    Modules that `kept_in_bf16` names stay in bf16.
    """
    shapes = parameter_shapes(model)
    sizes = {name: prod(shapes[f"{name}.weight"]) for name in layer_matrices(model)}
    return sum(size for name, size in sizes.items() if not is_kept(name, fp8.kept_in_bf16)) / sum(
        sizes.values()
    )
