"""Fitted constants of machines and engines: what they reach of their peaks, in one TOML card; no torch.

`benchmarks/planner/planner.py --fit` writes `cards/efficiency/published_runs.toml` from published runs. Every
constant has a physical meaning. No constant belongs to a source or a row.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kielo.recipe.errors import KieloError

ARCHITECTURES = ("volta", "ampere", "hopper", "blackwell", "cdna2", "cdna3", "cpu")
AMD = ("cdna2", "cdna3")
ENGINES = ("megatron_te", "megatron_deepspeed", "fsdp", "unfused")
_CARD = Path(__file__).resolve().parent.parent / "cards" / "efficiency" / "published_runs.toml"


@dataclass(frozen=True)
class Constant:
    """A constant to fit: one value for all, or one for each architecture or engine."""

    by: str  # "all", "architecture" or "engine"
    start: float  # of the fit, which is drawn to it
    spread: float  # standard deviation of the logarithm of a member's distance
    meaning: str
    starts: Mapping[str, float]  # of some members

    def start_of(self, member: str) -> float:
        return self.starts.get(member, self.start)


# Name, by, start, spread, meaning. ZeRO 3 gathers the next layer while the current layer computes, in all
# engines. flash_cudnn: 1.5 to 2 forward, 1.7 to 2.1 backward on H100 (Shah et al. 2024, arXiv:2407.08608,
# figures 5 and 6).
_TABLE = """
matrix architecture 0.8 0.3 share of bf16 peak that a large matrix product reaches
matrix_fp8 architecture 0.62 0.3 share of the 8-bit (4-bit) peak of a large product
flash architecture 0.5 0.35 share of bf16 peak that fused attention reaches at head size 128
matrix_engine engine 1.0 0.12 factor of an engine on these shares: its kernels, its clocks under load
rocm_engine engine 1.0 0.05 the same on AMD's devices: all engines call the same libraries there
elementwise engine 1.3 0.5 passes over memory by norms, activations, residuals; 1 is the minimum
accumulate engine 1.0 0.08 passes over memory to add a micro-batch's gradients; 1 is unfused
layer_seconds engine 0.0012 0.3 seconds to launch a layer's kernels, forward and backward
tensor_exposed engine 0.8 0.4 share of tensor-parallel traffic that is not hidden
data_hidden engine 0.5 0.7 share of a backward pass that can hide data-parallel traffic
gather_hidden all 0.9 0.15 share of a micro-batch's work that can hide ZeRO-3's collectives
overlap_cost all 0.2 0.5 seconds by which hidden data-parallel traffic slows the work, by its own
gather engine 0.85 0.2 ratio of bandwidths: ZeRO-3's small collectives to large ones
pipeline_exposed engine 0.7 0.7 share of stage-to-stage traffic that is not hidden
step_seconds engine 0.015 0.5 seconds of a step that no other term counts
memory all 0.75 0.2 share of memory bandwidth that streaming reaches
network all 0.7 0.1 share of the network's bandwidth that collectives reach
node all 0.65 0.3 share of the node's link bandwidth that collectives reach
latency_seconds all 2e-05 0.7 seconds of a collective beyond the transfer of its bytes
hop_seconds all 3e-06 0.5 seconds of a step of a ring over data-parallel ranks
tensor_launch all 1.4 0.3 ratio of a layer's launch time: with tensor parallelism to without
eager_launch all 2.0 0.3 ratio of a layer's launch time: with eager norms, rotation and activation to fused
tile all 40.0 0.7 inner dimension that takes as long as a tile's start and end
wave_elements all 800000.0 0.4 elements of a result that half a wave of tiles computes
misaligned all 1.2 0.2 slowdown of matrices whose sides are not multiples of 64
flash_1 all 0.65 0.25 ratio of rates: FlashAttention 1 to FlashAttention 2
flash_cudnn all 1.7 0.2 ratio of rates from Hopper on: cuDNN's fused attention to FlashAttention 2
softmax_bytes all 25.0 0.4 bytes that unfused attention moves per entry of the scores, both ways
unfused_attention all 2.0 0.4 ratio of these bytes: eager attention to fused softmax
small_heads all 0.3 0.5 slowdown of fused attention per halving of the head size from 128
quantise all 4.0 0.7 passes over memory to make 8-bit inputs
odd_heads all 5.0 0.4 slowdown of unfused attention whose head size is not a multiple of 8
fp8_rowwise all 0.8 0.2 ratio of rates: products with a scale per row or block to one per tensor
mxfp8 all 0.95 0.1 ratio of rates: products with a scale per 32 values to one per tensor
nvfp4 all 0.7 0.3 ratio of shares of peak: 4-bit products to 8-bit products
power all 0.5 0.3 exponent of (power cap / full power) in the matrix rate
jitter all 0.01 0.5 slowdown by the slowest device, per standard deviation of the maximum of n
"""
# Starts of single engines.
_STARTS = {
    # AMD's parts: the best product measured on MI300X, 668 of 1,300 TFLOP/s (stas00/ml-engineering 744d01e)
    "matrix": {"cdna2": 0.51, "cdna3": 0.51},
    # added up in the product that makes them, since late 2021: 6 bytes in place of 10
    "accumulate": {"megatron_te": 0.6, "unfused": 0.7},
    "tensor_exposed": {"megatron_deepspeed": 1.0, "unfused": 1.0},  # both wait for each all-reduce
    # both reduce gradients after the last backward pass
    "data_hidden": {"megatron_deepspeed": 0.05, "unfused": 0.05},
}


CONSTANTS = {
    name: Constant(by, float(start), float(spread), meaning, _STARTS.get(name, {}))
    for name, by, start, spread, meaning in (row.split(maxsplit=4) for row in _TABLE.strip().splitlines())
}


class Efficiency:
    """Values of all constants: `values[name]` is [members], or [1] for a constant of all."""

    def __init__(self, values: dict[str, np.ndarray]) -> None:
        self.values = values

    @staticmethod
    def start() -> "Efficiency":
        starts = {name: map(constant.start_of, members(name)) for name, constant in CONSTANTS.items()}
        return Efficiency({name: np.array(list(column)) for name, column in starts.items()})

    def of(self, workload: Any) -> SimpleNamespace:
        """Return each constant as a column [n] for the workload's architectures and engines, or a number."""
        index = {"architecture": workload.architecture.astype(int), "engine": workload.engine.astype(int)}
        columns = {}
        for name, constant in CONSTANTS.items():
            values = self.values[name]
            columns[name] = values[0] if constant.by == "all" else values[index[constant.by]]
        return SimpleNamespace(**columns)


def members(name: str) -> tuple[str, ...]:
    """Return the members that a constant has values for: engines, architectures, or "all"."""
    return {"architecture": ARCHITECTURES, "engine": ENGINES, "all": ("all",)}[CONSTANTS[name].by]


@cache
def fitted() -> tuple[Efficiency, dict[str, float]]:
    """Return (constants, figures of the prediction interval) of the shipped card."""
    return read_card(_CARD)


@cache
def published_engines(architecture: str) -> dict[str, dict[str, Any]]:
    """Return the engines whose published runs on an architecture took part in the shipped fit.

    Each has the `kernel` of attention and the share of layers recomputed (`layers_again`) of most of them.
    """
    return tomllib.loads(_CARD.read_text(encoding="utf-8"))["published"][architecture]


def read_card(path: Path) -> tuple[Efficiency, dict[str, float]]:
    """Read (constants, figures of the prediction interval). Raises KieloError if a constant is missing."""
    card = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        columns = {name: [card[name][member] for member in members(name)] for name in CONSTANTS}
    except KeyError as error:
        raise KieloError(
            f"{path}: {error.args[0]} is missing. Fix: `benchmarks/planner/planner.py --fit` for a whole card"
        ) from None
    values = {name: np.array(column, dtype=float) for name, column in columns.items()}
    return Efficiency(values), card.get("interval", {})


def card_text(efficiency: Efficiency, interval: dict[str, float], header: str) -> str:
    """Return the TOML of a card: a table for each constant, with its meaning above it."""
    lines = [f"# {line}" for line in header.splitlines()]
    for name, constant in CONSTANTS.items():
        lines += ["", f"# {constant.meaning}", f"[{name}]"]
        lines += [
            f"{member} = {value:.4g}"
            for member, value in zip(members(name), efficiency.values[name], strict=True)
        ]
    lines += ["", "# spread of log(published / predicted)", "[interval]"]
    lines += [f"{name} = {value:.4g}" for name, value in interval.items()]
    return "\n".join(lines) + "\n"
