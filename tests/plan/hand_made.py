"""A run on a machine of round numbers, and layouts of it whose seconds and bytes are made up."""

from functools import cache
from typing import Any

import numpy as np

from kielo.models.families import complete
from kielo.plan.efficiency import CONSTANTS, Efficiency, members
from kielo.plan.planned_layout import PlannedLayout
from kielo.plan.run_to_plan import RunToPlan
from kielo.recipe.cards import accelerator
from kielo.recipe.phases import FullPhase
from kielo.recipe.sections import Layout, Model, Recipe
from kielo.resolve.software import with_precision
from tests.launch.hand_made import site

# Each part of a step of 12 s.
SECONDS = {
    "matrix": 6.0, "attention": 1.0, "elementwise": 0.8, "launch": 0.02, "head": 0.5, "bubble": 1.25,
    "tensor_traffic": 0.9, "context_traffic": 0.0, "pipeline_traffic": 0.3, "data_traffic": 0.6,
    "optimiser": 0.13, "fixed": 0.1, "slowest": 0.4,
}  # fmt: skip
BYTES = {
    "weights": 4e9, "gradients": 4.5e9, "optimiser": 8e9, "activations": 10.2e9, "logits": 0.0,
    "gathered": 3e9, "workspace": 1e9,
}  # fmt: skip
CONSTANTS_OF_RUN = {
    "matrix": 0.8, "matrix_engine": 0.5, "rocm_engine": 1.0, "power": 0.5, "layer_seconds": 2e-3,
    "tensor_exposed": 0.7,
    "pipeline_exposed": 0.4, "data_hidden": 0.6, "gather_hidden": 0.9, "overlap_cost": 0.2, "jitter": 0.015,
    "matrix_fp8": 0.25,
}  # fmt: skip


@cache
def model() -> Model:
    shape = {
        "num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8,
        "intermediate_size": 2816, "vocab_size": 32_000, "tie_word_embeddings": False,
    }  # fmt: skip
    return complete(Model(model_type="llama", **shape), 2048)


def run(precision: str = "bf16", card: dict[str, Any] | None = None, **sections: Any) -> RunToPlan:
    """Ten nodes of four devices of 1 TFLOP/s, 4 in FP8; products take no time beside their FLOPs."""
    sections = {
        "corpus": {"sources": [{"name": "a", "path": "a.txt"}]}, "cluster": "laptop",
        "dataset": {"sequence_length": 2048}, "train": {"tokens": 98_304 * 10, "tokens_per_step": 98_304},
    } | sections  # fmt: skip
    recipe = with_precision(Recipe.model_validate({"name": "mine", "language": "et"} | sections), "bf16")
    device = accelerator("h100_80").model_copy(
        update={"peak_tflops": {"bf16": 1.0, "fp8": 4.0}, "memory_bandwidth_tb_per_second": 1e18,
                "power_share": 0.25, "memory_bytes": 50 * 10**9, "given_bytes": 50 * 10**9,
                "context_bytes": 2 * 10**9} | (card or {})
    )  # fmt: skip
    free = {"wave_elements": 0.0, "tile": 0.0, "misaligned": 1.0, "memory": 1.0}
    values = {
        name: np.full(len(members(name)), (free | CONSTANTS_OF_RUN).get(name, constant.start))
        for name, constant in CONSTANTS.items()
    }
    spread = {"lower": -0.1, "upper": 0.2}
    return RunToPlan(recipe, model(), site(torch="2.13"), device, Efficiency(values), spread, precision)


def a_phase(sequence_length: int, tokens_per_step: int, trainable: tuple[str, ...] = ()) -> FullPhase:
    return FullPhase(
        1, 10 * tokens_per_step, tokens_per_step, sequence_length, {"a": 1.0}, "one_stream", None,
        trainable, None, frozenset(),
    )  # fmt: skip


def planned(
    of: RunToPlan | None = None,
    seconds: dict[str, float] | None = None,
    bytes_: dict[str, float] | None = None,
    micro_batch: int = 2,
    **layout: Any,
) -> PlannedLayout:
    """A step of 48 sequences of 2,048; other keys are the layout's."""
    shape = Layout(**{"shard": 3, "tensor": 2, "pipeline": 4} | layout)
    data = shape.replicate * shape.shard
    devices = data * shape.tensor * shape.pipeline * shape.context
    micro_batches = -(-48 // (data * micro_batch))
    return PlannedLayout(
        of or run(), shape, -(-devices // 4), devices, a_phase(2048, 98_304), micro_batch, micro_batches,
        SECONDS | (seconds or {}), 11.0, 14.5, BYTES | (bytes_ or {}), 0.45,
    )  # fmt: skip
