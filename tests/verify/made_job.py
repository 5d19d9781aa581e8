"""A job of `kielo preflight` made by hand, layouts and cards for it, and findings as plain tuples."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kielo.recipe.cards import Accelerator, accelerator, cluster
from kielo.recipe.sections import Layout
from kielo.verify.preflight.job import Finding


def job(nodes: str = "aabb", kind: str = "cuda", **changes: Any) -> SimpleNamespace:
    """Makes a job whose ranks are on nodes of one letter; the functions of a real one are its own."""
    ranks = {node: [rank for rank, of in enumerate(nodes) if of == node] for node in dict.fromkeys(nodes)}
    usual = {
        "nodes": tuple(nodes), "ranks_of_nodes": lambda: ranks, "wait_for_all": lambda: None,
        "world": SimpleNamespace(device=SimpleNamespace(type=kind), size=len(nodes), rank=0),
        "cluster": cluster("laptop"), "device_card": None, "run_folder": Path("run"),
    }  # fmt: skip
    return SimpleNamespace(**(usual | changes))


def told(findings: list[Finding]) -> list[tuple[int | None, str, bool]]:
    return [(one.rank, one.message, one.is_refusal) for one in findings]


def layout(**axes: Any) -> Layout:
    return Layout(**({"pipeline": 1, "replicate": 1, "shard": 1, "context": 1, "tensor": 1} | axes))


def card(**changes: Any) -> Accelerator:
    update = {
        "peak_tflops": {"bf16": 100.0},
        "memory_bandwidth_tb_per_second": 2.0,
        "link_gb_per_second": 50.0,
    }
    return accelerator("gh200_96").model_copy(update=update | changes)
