"""FP8 products of one linear layer against fp32: output, input gradient and weight gradient of each scaling.

    python benchmarks/training/fp8_numerics.py                   emulated, on the CPU
    python benchmarks/training/fp8_numerics.py --device cuda     by the GPU's own FP8 kernels

An error is ‖FP8 - fp32‖ / ‖fp32‖ over all entries. Its bound follows from the formats: a number is rounded to
one of its two neighbours, whose distance Δ is 2⁻³ (e4m3) or 2⁻² (e5m2) of the power of two below it, and
below the smallest normal number that of the subnormal ones; so the error's mean square is Δ²/12, and in a
product x w of independent errors x² Δw²/12 + w² Δx²/12 + Δx² Δw²/144. Sums of such products add up in
squares. As Δ is taken from the number itself (which is up to twice that power of two) the bound is an upper
one, by about a fifth. bf16 results are rounded once more. Numbers are normal, or heavy-tailed: Student's t
with 3 degrees of freedom and, among inputs, one channel in 128 that is 20 times larger, as transformers have.
Writes results/fp8_numerics_cpu.json.
"""

import argparse
import json
import math
import sys
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kielo.parallel.fp8 import import_float8

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from machine import processor

SCALINGS = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Shape(NamedTuple):
    tokens: int
    inputs: int
    outputs: int


SMALL = Shape(256, 192, 320)
SHAPES = {
    "tiny up": Shape(1024, 384, 1024),
    "llama_1b attention": Shape(512, 2048, 2048),
    "llama_8b attention": Shape(256, 4096, 4096),
    "llama_8b down": Shape(256, 14336, 4096),
}


def main() -> None:
    options = _options()
    device = torch.device(options.device)
    rows = []
    for name in options.shapes:
        for tails in ("normal", "heavy"):
            for scaling in SCALINGS:
                measurements = measured(scaling, SHAPES[name], tails, device, torch.bfloat16)
                rows += [{"shape": name, "numbers": tails, "scaling": scaling} | row for row in measurements]
                if not options.json:
                    print(*map(_line, rows[-len(measurements) :]), sep="\n", flush=True)
    result = {
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "emulated": device.type == "cpu",
        "dtype": "bf16",
        "versions": {name: version(name) for name in ("kielo", "torch", "torchao")},
        "shapes": {name: SHAPES[name]._asdict() for name in options.shapes},
        "holds": all(row["error"] <= row["bound"] for row in rows),
        "rows": rows,
    }
    path = Path(options.to) / f"fp8_numerics_{device.type}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        print(f"every error within its bound: {result['holds']}")


def measured(
    scaling: Any, shape: Shape, tails: str, device: torch.device, dtype: torch.dtype, used: Any = None
) -> list[dict[str, Any]]:
    """Returns {"product", "error", "bound"} of the three products, with operands and results in `dtype`.

    scaling: a word or a Float8LinearConfig, which the bound is for. used: another config to multiply with.
    """
    float8 = import_float8()
    config = float8.Float8LinearConfig.from_recipe_name(scaling) if isinstance(scaling, str) else scaling
    x, w, g = (numbers.to(device, dtype) for numbers in _numbers(shape, tails))
    model = nn.Sequential(nn.Linear(shape.inputs, shape.outputs, bias=False, device="meta"))
    model[0].weight = nn.Parameter(w)
    float8.convert_to_float8_training(model, config=replace(used or config, emulate=device.type == "cpu"))
    x.requires_grad_()
    y = model(x)
    y.backward(g)
    results = {"output": y.detach(), "input gradient": x.grad, "weight gradient": model[0].weight.grad.T}
    x, w, g = (tensor.detach().float() for tensor in (x, w, g))
    # Each as rows times rows: what is summed over is the last dim of both.
    products = {
        "output": (x, w, config.cast_config_input, config.cast_config_weight),
        "input gradient": (g, w.T, config.cast_config_grad_output, config.cast_config_weight_for_grad_input),
        "weight gradient": (
            x.T, g.T, config.cast_config_input_for_grad_weight,
            config.cast_config_grad_output_for_grad_weight,
        ),
    }  # fmt: skip
    rows = []
    for product, (a, b, a_cast, b_cast) in products.items():
        exact = a @ b.T
        error = ((results[product].float() - exact).norm() / exact.norm()).item()
        rows.append(
            {"product": product, "error": error, "bound": _bound(a, b, a_cast, b_cast, config, dtype, exact)}
        )
    return rows


def _numbers(shape: Shape, tails: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns fp32 inputs [tokens, inputs], weight [outputs, inputs], output gradients [tokens, outputs]."""
    generator = torch.Generator().manual_seed(20261122)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    def student(*size: int) -> Tensor:
        chi_square = sum(normal(*size).square() for _ in range(3))
        return normal(*size) / (chi_square / 3).sqrt()

    draw = student if tails == "heavy" else normal
    x, w, g = (
        draw(shape.tokens, shape.inputs),
        0.02 * draw(shape.outputs, shape.inputs),
        1e-4 * draw(shape.tokens, shape.outputs),
    )
    if tails == "heavy":
        x[:, ::128] *= 20
    return x, w, g


def _bound(
    a: Tensor, b: Tensor, a_cast: Any, b_cast: Any, config: Any, dtype: torch.dtype, exact: Tensor
) -> float:
    """Returns the bound of ‖â b̂ᵀ - a bᵀ‖ / ‖a bᵀ‖ by rounding alone, for a [m, k] and b [n, k]."""
    a_variance, b_variance = (
        _variance(t, cast, config).sum(0).double() for t, cast in ((a, a_cast), (b, b_cast))
    )
    a_square, b_square = (t.double().square().sum(0) for t in (a, b))
    total = (a_variance * b_square + a_square * b_variance + a_variance * b_variance).sum()
    summing = a.shape[1] * torch.finfo(torch.float32).eps ** 2 * (a_square * b_square).sum()
    result = torch.finfo(dtype).eps ** 2 / 12 * exact.double().square().sum()
    return math.sqrt(total + summing + result) / exact.double().norm().item()


def _variance(t: Tensor, cast: Any, config: Any) -> Tensor:
    """Returns the mean square of each number's rounding error."""
    from torchao.float8.config import ScalingGranularity, ScalingType

    if cast.scaling_type is ScalingType.DISABLED:
        return torch.zeros_like(t)
    info = torch.finfo(cast.target_dtype)
    is_whole = cast.scaling_granularity is ScalingGranularity.TENSORWISE
    largest = t.abs().max() if is_whole else t.abs().amax(1, keepdim=True)
    scale = info.max / largest
    if config.round_scales_to_power_of_2:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    least = info.smallest_normal * info.eps / scale  # between subnormal numbers
    spacing = torch.maximum(info.eps * t.abs(), least.expand_as(t))
    return torch.where(t.abs() < least / 2, t.square(), spacing.square() / 12)  # the least become zero


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['shape']:20} {row['numbers']:7} {row['scaling']:19} {row['product']:16} "
        f"error {row['error']:.5f}  bound {row['bound']:.5f}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cpu: emulated; cuda: the GPU's kernels"
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument(
        "--to", default=str(Path(__file__).parents[1] / "results"), help="folder of the result"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
