"""What a run is computed in, as plans need it: which precision most steps have, and what of a model is in
FP8; no torch.
"""

from math import prod

from kielo.models.parameter_shapes import parameter_shapes
from kielo.recipe.phases import full_phases
from kielo.recipe.sections import Fp8, Model, Precision, Recipe
from kielo.resolve.fp8_check import is_kept, layer_matrices
from kielo.resolve.phases import plan_phases


def steps_by_precision(recipe: Recipe) -> dict[Precision, int]:
    """Precision → steps that the recipe wants computed in it, whether or not they are passed over."""
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
    """What most steps are computed in; of two with as many, the one that comes first."""
    steps = steps_by_precision(recipe)
    return max(steps, key=steps.get)


def matrix_recipe(precision: Precision, fp8: Fp8) -> str:
    """The word of `workload.RECIPES` for the layers' matrix products."""
    if precision != "fp8":
        return "bf16"
    return "fp8" if fp8.scaling == "tensorwise" else "fp8_rowwise"


def is_gathered_in_fp8(fp8: Fp8, device: str) -> bool:
    """Are weights sent, and held whole, in 8 bits? On a processor FP8 is only emulated."""
    return fp8.gathered_in_fp8 and fp8.scaling == "tensorwise" and device == "cuda"


def fp8_share(model: Model, fp8: Fp8) -> float:
    """Of the layers' matrices in FP8, by weights, for a complete `model`: all but those in modules that
    `kept_in_bf16` names.
    """
    shapes = parameter_shapes(model)
    sizes = {name: prod(shapes[f"{name}.weight"]) for name in layer_matrices(model)}
    return sum(size for name, size in sizes.items() if not is_kept(name, fp8.kept_in_bf16)) / sum(
        sizes.values()
    )
