"""A layout of a run → the columns that bytes of a device are computed from; arithmetic, no torch.

`resolve/micro_batch.py` chooses micro-batches by them, and plans have them beside columns for seconds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple, Self

import numpy as np

from kielo.recipe.cards import Accelerator
from kielo.recipe.optimisers import ADAMW_TRAFFIC_BYTES, OPTIMISERS
from kielo.recipe.sections import (
    CompleteModel,
    Fp8,
    Layout,
    Precision,
    ReduceDtype,
    StateDtype,
    Train,
)
from kielo.resolve.activation_bytes import (
    attention_dropout_bytes,
    dropout_bytes,
    layer_parts,
    loss_chunk_tokens,
    memory_columns,
)
from kielo.resolve.fp8_matrices import fp8_share, is_gathered_in_fp8
from kielo.resolve.planned_phases import frozen_share
from kielo.resolve.stages import SCHEDULES

Column = np.ndarray
_ZERO: Any = np.float64(0)  # a column of any length


class StepSize(NamedTuple):
    """Sizes of a step: tokens of a sequence, sequences of a micro-batch, micro-batches of a rank."""

    sequence_length: int
    micro_batch: int
    micro_batches: int


@dataclass(frozen=True)
class TrainOptions:
    """Settings of the recipe's [train] that bytes and seconds of a step depend on.

    trainable: the modules that the step's phase trains, none for all.
    """

    precision: Precision = "bf16"
    fp8: Fp8 = Fp8()
    optimiser_state: StateDtype = "fp32"
    loss_chunk_tokens: int | None = None
    gradient_reduce_dtype: ReduceDtype = "fp32"
    deterministic: bool = False
    trainable: tuple[str, ...] = ()
    optimiser: str = "adamw"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0

    @staticmethod
    def of(precision: Precision, train: Train, trainable: tuple[str, ...] = ()) -> "TrainOptions":
        """Return the settings of `train` for steps in `precision` of a phase that trains these modules."""
        return TrainOptions(
            precision,
            train.fp8,
            train.optimiser_state,
            train.loss_chunk_tokens,
            train.gradient_reduce_dtype,
            train.deterministic,
            trainable,
            train.optimiser,
            train.hidden_dropout,
            train.attention_dropout,
        )


@dataclass(frozen=True, kw_only=True)
class MemoryColumns:
    """n trainings as columns [n]; sizes are whole numbers in floats, so that products cannot overflow.

    Model: `mlp_matrices` is 3 for a gated MLP, else 2. `sequence` is tokens a sample. Layout: `chunks` are
    pipeline stages a rank, `shard` the ranks that ZeRO splits over, `zero` 0 to 3.
    """

    hidden: Column
    ffn: Column
    mlp_matrices: Column
    vocabulary: Column
    sequence: Column
    tensor: Column
    pipeline: Column
    chunks: Column
    context: Column
    shard: Column
    zero: Column
    sequence_parallel: Column
    micro_batch: Column
    micro_batches: Column
    splits_backward: Column  # 1 for schedules that split the backward pass
    optimiser_bytes: Column  # of a parameter between steps, with master weights
    # as in `recipe/optimisers.py`
    update_traffic_bytes: Column = _ZERO + ADAMW_TRAFFIC_BYTES
    update_flops: Column = _ZERO
    widened_bytes: Column = _ZERO
    whole_update_bytes: Column = _ZERO
    tied: Column  # 1 where head and embedding are tied
    # Counted for Kielo's own training by `activation_bytes.memory_columns`; 0 for other engines.
    # bytes of a parameter in the precision of the compute, gathered from fp32 shards
    compute_bytes: Column = _ZERO
    gathered_bytes: Column = _ZERO  # the same of a layer's parameter; 1 where matrices are gathered in 8 bits
    reduce_bytes: Column = _ZERO  # of a gradient, where data-parallel ranks send it
    frozen: Column = _ZERO  # share of the layers' parameters that are not trained
    layer_elements: Column = _ZERO  # of one layer's matrices on a tensor rank
    # of the first pipeline rank, and of the last where that is another rank and has the head
    first_parameters: Column = _ZERO
    last_parameters: Column = _ZERO
    first_layers: Column = _ZERO
    last_layers: Column = _ZERO
    # chunks' passes under way at once on these ranks, if there are micro-batches enough
    first_passes: Column = _ZERO
    last_passes: Column = _ZERO
    # bytes of a token and layer from forward to backward; and those added while a layer is recomputed
    kept_bytes: Column = _ZERO
    again_bytes: Column = _ZERO
    logit_bytes: Column = _ZERO
    # 1 where the head's logits and its input's gradient are in FP8
    head_in_recipe: Column = _ZERO
    loss_tokens: Column = _ZERO  # tokens whose logits exist at one time

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Self:
        """Make columns from rows that have a number for each field without a default."""
        rows = list(rows)
        return cls(
            **{
                field.name: np.array(
                    [
                        row[field.name] if field.default is MISSING else row.get(field.name, field.default)
                        for row in rows
                    ],
                    dtype=float,
                )
                for field in fields(cls)
            }
        )

    def __len__(self) -> int:
        return len(self.hidden)

    def take(self, index: Column) -> Self:
        """Return the trainings at `index` (numbers or booleans)."""
        return type(self)(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    @property
    def tokens(self) -> Column:
        """Tokens of a micro-batch on a device, with all hidden columns, or 1 / tensor of them where split."""
        return self.micro_batch * self.sequence / self.context


def memory_row(
    model: CompleteModel,
    layout: Layout,
    step: StepSize,
    train: TrainOptions,
    card: Accelerator | None = None,
    on_processor: bool = False,
) -> dict[str, Any]:
    """Return a row for `MemoryColumns.of`: a complete `model` trained by Kielo.

    `layout_complaints` has found nothing wrong with `layout`, and `layout.shard` is a number, not 0.
    card: the device's, None for a GPU of unknown memory. on_processor: counts bytes as a rehearsal does.
    """
    device = "cpu" if on_processor else card.device if card else "cuda"
    chunk_tokens = loss_chunk_tokens(train.loss_chunk_tokens, model, layout, card)
    schedule, is_pipeline = SCHEDULES[layout.pipeline_schedule], layout.pipeline > 1
    optimiser = OPTIMISERS[train.optimiser]
    own = memory_columns(model, layout, step.sequence_length, train.precision, chunk_tokens, on_processor)
    if train.hidden_dropout:
        own["kept_bytes"] += dropout_bytes(model, layout)
    if train.attention_dropout:
        own["kept_bytes"] += attention_dropout_bytes(model, layout, train.precision)
    if train.precision == "fp8" and is_gathered_in_fp8(train.fp8, device):
        own["gathered_bytes"] -= fp8_share(model, train.fp8)
    return {
        "hidden": model.hidden_size, "ffn": model.intermediate_size,
        "mlp_matrices": layer_parts(model).mlp_matrices, "vocabulary": model.vocab_rows,
        "sequence": step.sequence_length, "tensor": layout.tensor, "pipeline": layout.pipeline,
        "chunks": (layout.pipeline_stages_per_rank or schedule.stages_per_rank) if is_pipeline else 1,
        "context": layout.context, "shard": layout.shard * layout.context, "zero": layout.zero,
        "sequence_parallel": float(layout.sequence_parallel and layout.tensor > 1),
        "micro_batch": step.micro_batch, "micro_batches": step.micro_batches,
        "splits_backward": float(schedule.splits_backward and is_pipeline),
        "optimiser_bytes": optimiser.state_bytes(train.optimiser_state),
        "update_traffic_bytes": optimiser.traffic_bytes[train.optimiser_state],
        "update_flops": optimiser.flops,
        "widened_bytes": optimiser.widened_bytes[train.optimiser_state],
        "whole_update_bytes": optimiser.whole_update_bytes, "tied": float(model.tie_word_embeddings),
        "head_in_recipe": float(train.precision == "fp8" and train.fp8.head),
        "reduce_bytes": {"fp32": 4, "bf16": 2}[train.gradient_reduce_dtype],
        "frozen": frozen_share(model, train.trainable),
    } | own  # fmt: skip
