"""A GPT on one node of H100, as columns of the planner; tests change what they are about."""

from typing import Any

from kielo.plan.efficiency import ENGINES
from kielo.plan.workload import ATTENTION_KERNELS, RECIPES, Workload, machine_columns
from kielo.recipe.cards import accelerator


def workload(*changes: dict[str, Any]) -> Workload:
    """One training for each of `changes`."""
    return Workload.of([columns(**change) for change in changes or ({},)])


def columns(**changes: Any) -> dict[str, Any]:
    """A row: model of 4 layers, no parallelism, nothing computed anew."""
    shape = {
        "layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 8, "head_dim": 128, "ffn": 4096,
        "mlp_matrices": 2,
        "vocabulary": 32000, "sequence": 2048, "tied": 0,
    }  # fmt: skip
    layout = {
        "tensor": 1, "pipeline": 1, "chunks": 1, "context": 1, "data": 1, "shard": 1, "zero": 1,
        "sequence_parallel": 0,
        "micro_batch": 1, "micro_batches": 8, "layers_again": 0, "attention_again": 0, "operators_again": 0,
        "splits_backward": 0,
    }  # fmt: skip
    engine = {
        "weight_bytes": 2, "gradient_bytes": 4, "optimiser_bytes": 12, "dropout": 0, "unfused_norms": 0,
        "whole_logits": 0,
        "recipe": RECIPES.index("bf16"), "kernel": ATTENTION_KERNELS.index("flash"),
        "engine": ENGINES.index("megatron_te"),
    }  # fmt: skip
    machine = machine_columns(accelerator("h100_80"), 400e9, 8, "bf16")
    return shape | layout | engine | machine | changes
