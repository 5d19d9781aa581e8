"""A layout of a recipe on a machine → a row of a `Workload`: Kielo's settings as the planner's columns."""

from typing import Any

from kielo.plan.efficiency import ENGINES
from kielo.plan.precision import matrix_recipe
from kielo.plan.workload import ATTENTION_KERNELS, RECIPES, machine_columns
from kielo.recipe.cards import Accelerator, Cluster
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import Layout, Model
from kielo.resolve.fp8_matrices import fp8_share
from kielo.resolve.memory_row import StepSize, TrainOptions, memory_row
from kielo.resolve.tensor_overlap import chunks_of

# What `layout.recompute` names → the column with the share of it that is recomputed, less "_again".
_COLUMNS = {
    "full": "layers", "operators": "operators", "attention": "attention", "norms": "norms",
    "activations": "activations",
}  # fmt: skip


def workload_row(
    model: Model,
    layout: Layout,
    card: Accelerator,
    cluster: Cluster,
    step: StepSize,
    train: TrainOptions,
    on_processor: bool = False,
) -> dict[str, Any]:
    """Returns a row for `Workload.of`: a complete `model` trained by Kielo (FSDP2, fp32 weights).

    `stage_complaints` has found nothing wrong with `layout`, and `layout.shard` is a number, not 0. The
    card's bf16 peak must be that of `train.precision`: fp32 changes only bytes here. on_processor: counts
    bytes as a rehearsal does.
    """
    again = {
        f"{name}_again": float(part in layout.recomputed) / layout.recompute_every_layers
        for part, name in _COLUMNS.items()
    }
    fp8, is_fp8 = train.fp8, train.precision == "fp8"
    recipe, share = matrix_recipe(train.precision, fp8), fp8_share(model, fp8) if is_fp8 else 1.0
    return memory_row(model, layout, step, train, card, on_processor) | again | {
        "layers": model.num_hidden_layers, "heads": model.num_attention_heads,
        "kv_heads": model.num_key_value_heads, "head_dim": model.head_dim,
        "data": layout.replicate * layout.shard, "ring_share": cluster.ring_share or 0.0,
        "weight_bytes": 4, "gradient_bytes": 4,
        "dropout": float(train.hidden_dropout > 0), "unfused_norms": 0.0, "whole_logits": 0.0,
        "deterministic": float(train.deterministic),
        "causal": float(not FAMILIES[model.model_type].is_encoder),
        "recipe": RECIPES.index(recipe), "kernel": ATTENTION_KERNELS.index("flash"),
        "engine": ENGINES.index("fsdp"), "overlap_chunks": 1 if is_fp8 else chunks_of(layout),
        "recipe_share": share, "wide_weight_gradients": float(fp8.scaling == "rowwise_with_gw_hp"),
    } | machine_columns(
        card, cluster.network_gbit_per_second_per_node * 1e9 / 8, cluster.devices_per_node, recipe
    )  # fmt: skip
