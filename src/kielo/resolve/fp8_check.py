"""Checks that a model and a device can multiply in FP8; lists the matrices: arithmetic, torch-free."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from math import prod

from kielo.models import families
from kielo.models.parameter_shapes import parameter_shapes
from kielo.models.tensor_parallel_styles import style_of
from kielo.recipe.cards import Accelerator
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import Fp8, Layout, Model

MULTIPLE = 16  # both dims of a weight, on each rank: torch._scaled_mm takes no others
_MATRIX_STYLES = ("column", "row")
# What is called so → what its width on a tensor rank is a product of, and what divides it.
_HEAD_WIDTHS = {
    "q": "num_attention_heads", "o": "num_attention_heads",
    "k": "num_key_value_heads", "v": "num_key_value_heads",
}  # fmt: skip


def fp8_complaints(model: Model, layout: Layout, fp8: Fp8) -> list[str]:
    """Returns what in `fp8` does not fit `model` (complete), and sizes that FP8 kernels cannot multiply.

    Each complaint says what would work. Emulation multiplies any size. `layout_check` checks that
    `layout.tensor` divides at all.
    """
    if FAMILIES[model.model_type].has_relative_positions:
        return [
            f'train.precision = "fp8": model.model_type = {model.model_type!r} multiplies its matrices with '
            "relative positions, whose number is odd, and FP8 kernels do not; what would work: "
            'train.precision = "bf16"'
        ]
    matrices = layer_matrices(model)
    complaints = list(_unknown_patterns(matrices, fp8.kept_in_bf16))
    in_fp8 = [name for name in matrices if not is_kept(name, fp8.kept_in_bf16)]
    if not in_fp8:
        complaints.append(
            f"train.fp8.kept_in_bf16 = {list(fp8.kept_in_bf16)} leaves no matrix in FP8; what would work: "
            'fewer patterns, or train.precision = "bf16"'
        )
    if not fp8.emulate:
        complaints += _size_complaints(model, layout.tensor, {name.rpartition(".")[2] for name in in_fp8})
    if fp8.head and not fp8.emulate and model.vocab_rows // layout.tensor % MULTIPLE:
        complaints.append(
            f"train.fp8.head: {model.vocab_rows} rows of the vocabulary over layout.tensor = "
            f"{layout.tensor} are no multiple of {MULTIPLE} a rank, and FP8 kernels multiply no other sizes; "
            f"what would work: model.vocab_multiple = {MULTIPLE * layout.tensor}, or train.fp8.head = false"
        )
    return complaints


def without_fp8(card: Accelerator) -> str | None:
    """Returns the complaint about a device that multiplies nothing in 8 bits, or None."""
    if card.peak_tflops.get("fp8"):
        return None
    return (
        f'train.precision = "fp8" on {card.name}: its card has no fp8 peak, so its products would gain '
        'nothing; what would work: train.precision = "bf16", or devices that have FP8 (NVIDIA from H100 on, '
        "AMD from MI300X on)"
    )


def layer_matrices(model: Model) -> list[str]:
    """Returns the names of all modules in the layers of the whole model that are one matrix."""
    plan = families.module(model.model_type, "tensor_parallel_plan").TENSOR_PARALLEL_PLAN
    weights = families.module(model.model_type, "names").to_hugging_face(model)
    modules = (
        name.removesuffix(".weight")
        for name in weights
        if name.startswith("layers.") and name.endswith(".weight")
    )
    return [name for name in modules if style_of(plan, name) in _MATRIX_STYLES]


def is_kept(module_name: str, patterns: Iterable[str]) -> bool:
    """Returns True if a shell pattern (`*` takes dots too) matches the module's name or one around it."""
    parts = module_name.split(".")
    around = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in around)


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


def _unknown_patterns(matrices: list[str], patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        if not any(is_kept(name, [pattern]) for name in matrices):
            layers = len({name.split(".")[1] for name in matrices})
            kinds = dict.fromkeys(name.split(".", 2)[2] for name in matrices)
            yield (
                f'train.fp8.kept_in_bf16: "{pattern}" names no matrix of the layers; what would work: '
                f'"layers.0" to "layers.{layers - 1}", with "*" for any number, alone or with '
                f"{_listed(f'.{kind}' for kind in kinds)}"
            )


def _size_complaints(model: Model, tensor: int, kinds: set[str]) -> Iterator[str]:
    """kinds: the last parts of the names of the matrices in FP8."""
    if model.hidden_size % MULTIPLE:
        yield (
            f"model.hidden_size = {model.hidden_size}: FP8 kernels multiply sizes in multiples of "
            f"{MULTIPLE}; what would work: model.hidden_size of "
            f"{_listed(_neighbours(model.hidden_size, MULTIPLE))}{_ELSE}"
        )
    for key in dict.fromkeys(_HEAD_WIDTHS[kind] for kind in sorted(kinds & _HEAD_WIDTHS.keys())):
        heads = getattr(model, key)
        yield from _width_complaint(
            f"model.{key} × model.head_dim = {heads} × {model.head_dim}",
            heads * model.head_dim, tensor,
            f"model.head_dim of {_listed(_neighbours(model.head_dim, MULTIPLE))}",
        )  # fmt: skip
    if kinds - _HEAD_WIDTHS.keys():
        size = model.intermediate_size
        larger = f"model.intermediate_size of {_listed(_neighbours(size, MULTIPLE * tensor))}"
        yield from _width_complaint(f"model.intermediate_size = {size}", size, tensor, larger)


def _width_complaint(what: str, width: int, tensor: int, larger: str) -> Iterator[str]:
    if width % tensor or width // tensor % MULTIPLE == 0:
        return
    ranks = [number for number in range(1, tensor) if width % number == 0 and width // number % MULTIPLE == 0]
    fewer = f"layout.tensor of {_listed(ranks)}, or " if ranks else ""
    yield (
        f"{what} over layout.tensor = {tensor} is {width // tensor} a rank: FP8 kernels multiply sizes in "
        f"multiples of {MULTIPLE}; what would work: {fewer}{larger}{_ELSE}"
    )


_ELSE = "; or leave such matrices out by train.fp8.kept_in_bf16"


def _neighbours(size: int, multiple: int) -> list[int]:
    below = size // multiple * multiple
    return [number for number in (below, below + multiple) if number]


def _listed(choices: Iterable[object]) -> str:
    return " or ".join(map(str, choices))
