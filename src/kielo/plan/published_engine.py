"""Seconds of a step by an engine whose runs on such devices were published; arithmetic, no torch.

No run of Kielo took part in the shipped fit. Until `kielo plan calibrate` has measured a machine, a plan says
what an engine that was measured on its devices takes, with that engine's kernels and recomputation.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kielo.plan.efficiency import ARCHITECTURES, ENGINES, Efficiency, published_engines
from kielo.plan.step_seconds import step_seconds
from kielo.plan.workload import ATTENTION_KERNELS, Workload

Column = np.ndarray
_NAMES = {
    "fsdp": "PyTorch's FSDP", "megatron_te": "Megatron-LM with Transformer Engine",
    "megatron_deepspeed": "Megatron-DeepSpeed",
}  # fmt: skip
_UNFUSED = ("unfused", "fused_softmax")


class PublishedEngine(NamedTuple):
    """An engine in words, and a factor: seconds of its step by the planned seconds."""

    name: str
    way: str  # what its runs computed with, if it differs from the plan
    factor: float


def published_beside(work: Workload, efficiency: Efficiency) -> list[PublishedEngine | None]:
    """Return the published engine beside each entry of `work`, None if no run on such devices was published.

    FSDP is the engine whose constants a plan has, so if it was measured there it is the engine. Else it is
    the slowest of the others. The unfused Megatron of 2020 to 2022 is left out.
    """
    if not len(work):
        return []
    engines = published_engines(ARCHITECTURES[int(work.architecture[0])])
    if "fsdp" in engines:
        return [PublishedEngine(_NAMES["fsdp"], "", 1.0) for _ in range(len(work))]
    own = step_seconds(work, efficiency).total
    found: list[list[PublishedEngine]] = []
    for engine, usual in engines.items():
        if engine in _NAMES:
            theirs = _as_published(work, engine, usual["kernel"], usual["layers_again"])
            factors = step_seconds(theirs, efficiency).total / own
            way = _in_words(usual["kernel"], usual["layers_again"])
            found.append([PublishedEngine(_NAMES[engine], way, float(factor)) for factor in factors])
    if not found:
        return [None for _ in range(len(work))]
    return [max(several, key=lambda one: one.factor) for several in zip(*found, strict=True)]


def _as_published(work: Workload, engine: str, kernel: str, layers_again: float) -> Workload:
    """Return the steps of the same layouts, by another engine and as most of its runs computed."""
    number = np.ones(len(work))
    changes: dict[str, Column] = {
        "engine": ENGINES.index(engine) * number,
        "kernel": ATTENTION_KERNELS.index(kernel) * number,
        "unfused_loss": number * (engine == "megatron_deepspeed"),
    }
    if layers_again:
        parts = ("attention", "operators", "norms", "activations")
        changes |= {f"{part}_again": 0 * number for part in parts}
        changes["layers_again"] = np.maximum(work.layers_again, layers_again)
    return replace(work, **changes)


def _in_words(kernel: str, layers_again: float) -> str:
    parts = ["unfused attention"] * (kernel in _UNFUSED) + ["all layers recomputed"] * (layers_again >= 1)
    return " and ".join(parts)
