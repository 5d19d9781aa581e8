"""A layout of a recipe on a machine → a row of a `Workload`: Kielo's settings as the planner's columns."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kielo.plan.activation_bytes import layer_parts, memory_columns
from kielo.plan.efficiency import ENGINES
from kielo.plan.precision import fp8_share, is_gathered_in_fp8, matrix_recipe
from kielo.plan.workload import ATTENTION_KERNELS, RECIPES, machine_columns
from kielo.recipe.cards import Accelerator, Cluster
from kielo.recipe.sections import Fp8, Layout, Model, Precision
from kielo.resolve.loss_chunk import loss_chunk_tokens
from kielo.resolve.stages import SCHEDULES
from kielo.resolve.state_bytes import STATE_BYTES

_RECOMPUTE = {  # layout.recompute → shares of (layers, attention, operators) that are recomputed
    "none": (0.0, 0.0, 0.0), "attention": (0.0, 1.0, 0.0), "operators": (0.0, 0.0, 1.0),
    "full": (1.0, 0.0, 0.0),
}  # fmt: skip


class StepSize(NamedTuple):
    """Sizes of a step: tokens of a sequence, sequences of a micro-batch, micro-batches of a rank."""

    sequence_length: int
    micro_batch: int
    micro_batches: int


@dataclass(frozen=True)
class TrainOptions:
    """Settings of the recipe's [train] that bytes and seconds of a step depend on."""

    precision: Precision = "bf16"
    fp8: Fp8 = Fp8()
    optimiser_state: Literal["fp32", "bf16"] = "fp32"
    loss_chunk_tokens: int | None = None


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
    schedule = SCHEDULES[layout.pipeline_schedule]
    layers_again, attention_again, operators_again = _RECOMPUTE[layout.recompute]
    ranks, fp8, is_fp8 = layout.shard * layout.context, train.fp8, train.precision == "fp8"
    recipe, share = matrix_recipe(train.precision, fp8), fp8_share(model, fp8) if is_fp8 else 1.0
    chunk_tokens = loss_chunk_tokens(train.loss_chunk_tokens, model, layout, card)
    own = memory_columns(model, layout, step.sequence_length, train.precision, chunk_tokens, on_processor)
    is_gathered = is_fp8 and is_gathered_in_fp8(fp8, "cpu" if on_processor else card.device)
    return {
        "layers": model.num_hidden_layers, "hidden": model.hidden_size, "heads": model.num_attention_heads,
        "kv_heads": model.num_key_value_heads, "head_dim": model.head_dim, "ffn": model.intermediate_size,
        "mlp_matrices": layer_parts(model).mlp_matrices,
        "vocabulary": model.vocab_rows, "sequence": step.sequence_length,
        "tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context,
        "chunks": (layout.pipeline_stages_per_rank or schedule.stages_per_rank) if layout.pipeline > 1 else 1,
        "data": layout.replicate * layout.shard, "shard": ranks, "zero": layout.zero,
        "sequence_parallel": float(layout.sequence_parallel and layout.tensor > 1),
        "ring_share": cluster.ring_share or 0.0,
        "micro_batch": step.micro_batch, "micro_batches": step.micro_batches,
        "layers_again": layers_again / layout.recompute_every_layers,
        "attention_again": attention_again, "operators_again": operators_again,
        "splits_backward": float(schedule.splits_backward and layout.pipeline > 1),
        "weight_bytes": 4, "gradient_bytes": 4, "optimiser_bytes": 2 * STATE_BYTES[train.optimiser_state],
        "dropout": 0.0, "unfused_norms": 0.0, "whole_logits": 0.0, "tied": float(model.tie_word_embeddings),
        "recipe": RECIPES.index(recipe), "kernel": ATTENTION_KERNELS.index("flash"),
        "engine": ENGINES.index("fsdp"),
        "recipe_share": share, "head_in_recipe": float(is_fp8 and fp8.head),
        "wide_weight_gradients": float(fp8.scaling == "rowwise_with_gw_hp"),
    } | own | {"gathered_bytes": own["gathered_bytes"] - share * is_gathered} | machine_columns(
        card, cluster.network_gbit_per_second_per_node * 1e9 / 8, cluster.devices_per_node, recipe
    )  # fmt: skip
