"""The matrices that a run multiplies in FP8: arithmetic, torch-free. `rules.py` has the rules on them."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from math import prod

from kielo.models import families
from kielo.models.parameter_shapes import parameter_shapes, style_of
from kielo.recipe.sections import CompleteModel, Fp8

MULTIPLE = 16  # torch._scaled_mm needs it of both dimensions of a weight on each rank
_MATRIX_STYLES = ("column", "row")


def layer_matrices(model: CompleteModel) -> list[str]:
    """Return the names of all modules in the model's layers that are one matrix."""
    plan = families.module(model.model_type, "tables").TENSOR_PARALLEL_PLAN
    weights = families.module(model.model_type, "tables").to_hugging_face(model)
    modules = (
        name.removesuffix(".weight")
        for name in weights
        if name.startswith("layers.") and name.endswith(".weight")
    )
    return [name for name in modules if style_of(plan, name) in _MATRIX_STYLES]


def is_kept(module_name: str, patterns: Iterable[str]) -> bool:
    """Return True if a shell pattern (`*` matches dots too) matches the module's name or one around it."""
    parts = module_name.split(".")
    around = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in around)


def is_gathered_in_fp8(fp8: Fp8, device: str) -> bool:
    """Return True if weights are gathered in 8 bits. On a CPU FP8 is only emulated."""
    return fp8.gathered_in_fp8 and fp8.scaling == "tensorwise" and device == "cuda"


def fp8_share(model: CompleteModel, fp8: Fp8) -> float:
    """Return the share of the layers' matrices in FP8, by weights, for a complete `model`."""
    shapes = parameter_shapes(model)
    sizes = {name: prod(shapes[f"{name}.weight"]) for name in layer_matrices(model)}
    in_fp8 = sum(size for name, size in sizes.items() if not is_kept(name, fp8.kept_in_bf16))
    return in_fp8 / sum(sizes.values())
