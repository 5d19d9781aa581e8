"""Queries, keys and values, and gate and up: three ways to compute them, forward and backward, side by side.

    python benchmarks/projections.py --shape tiny --precision fp32 --rounds 40
    python benchmarks/projections.py --shape llama_8b --precision bf16 --rounds 40

separate      one autograd node a matrix, as nn.Linear does
accumulated   one node for all, the input's gradient added up in the products (`parallel/projection.py`)
joined        one product of the matrices' joined rows, which are copied for each forward and backward

The three take turns in each round, in another order every time. A ratio above 1 means that a way is faster
than `separate`; it is the median over rounds, with a 95 % bootstrap interval. CPU seconds are the process's
own (set OMP_NUM_THREADS=1), so other work on the machine counts less. Prints a table.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from step_shapes import SHAPES, whole_model
from torch import Tensor, nn

from kielo.models.blocks.joint_projection import JointProjection
from kielo.parallel.fsdp import COMPUTE_DTYPES
from kielo.parallel.projection import AccumulatingProjection

_BOOTSTRAP, _SEED = 10_000, 1


class JoinedProjection(JointProjection):
    def forward(self, x_bsd: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        joined = torch.cat([linear.weight for linear in linears])
        return nn.functional.linear(x_bsd, joined).split([linear.out_features for linear in linears], -1)


WAYS = {"separate": JointProjection, "accumulated": AccumulatingProjection, "joined": JoinedProjection}


def measure(
    widths: Sequence[int], x_bsd: Tensor, rounds: int, clock: Callable[[], float]
) -> dict[str, np.ndarray]:
    """Returns way → seconds of each round, after one that is not counted."""
    like = {"device": x_bsd.device, "dtype": x_bsd.dtype}
    linears = [nn.Linear(x_bsd.shape[-1], width, bias=False, **like) for width in widths]
    gradients = [torch.randn(*x_bsd.shape[:-1], width, **like) for width in widths]
    projections = {name: way() for name, way in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    order, chance = list(WAYS), random.Random(_SEED)
    for _ in range(rounds + 1):
        chance.shuffle(order)
        for name in order:
            begun = clock()
            inputs = [x_bsd, *(linear.weight for linear in linears)]
            torch.autograd.grad(projections[name](x_bsd, linears), inputs, gradients)
            seconds[name].append(clock() - begun)
    return {name: np.array(of_way[1:]) for name, of_way in seconds.items()}


def device_seconds() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def interval(ratios: np.ndarray) -> tuple[float, float]:
    chosen = np.random.default_rng(_SEED).integers(len(ratios), size=(_BOOTSTRAP, len(ratios)))
    return tuple(np.quantile(np.median(ratios[chosen], axis=1), (0.025, 0.975)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = device_seconds if device.type == "cuda" else time.process_time
    model, shape = whole_model(options.shape), SHAPES[options.shape]
    keys = model.num_key_value_heads * model.head_dim
    x_bsd = torch.randn(
        shape.micro_batch_sequences,
        shape.sequence_length,
        model.hidden_size,
        device=device,
        dtype=COMPUTE_DTYPES[options.precision],
        requires_grad=True,
    )
    for what, widths in (
        ("queries, keys, values", (model.num_attention_heads * model.head_dim, keys, keys)),
        ("gate, up", (model.intermediate_size,) * 2),
    ):
        seconds = measure(widths, x_bsd, options.rounds, clock)
        for name, of_way in seconds.items():
            ratios = seconds["separate"] / of_way
            low, high = interval(ratios)
            print(
                f"{options.shape} {options.precision} {device.type}, {what}: {name} "
                f"{1e3 * np.median(of_way):.2f} ms, {np.median(ratios):.3f} ({low:.3f} to {high:.3f})"
            )


if __name__ == "__main__":
    main()
