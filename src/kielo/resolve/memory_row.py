"""A layout of a run → the columns from which bytes of a device are computed; arithmetic, no torch.

`resolve/micro_batch.py` chooses micro-batches by them. Plans have them beside columns for seconds.
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
    alibi_bytes,
    attention_dropout_bytes,
    dropout_bytes,
    layer_parts,
    loss_chunk_tokens,
    memory_columns,
)
from kielo.resolve.fp8_matrices import fp8_share, is_gathered_in_fp8
from kielo.resolve.planned_phases import frozen_share
from kielo.resolve.software import compile_advice
from kielo.resolve.stages import SCHEDULES

Column = np.ndarray
_ZERO: Any = np.float64(0)  # a column of any length
# Of a forward pass of evaluation.
MOST_TOKENS_PER_FORWARD = 8192
MOST_LOGITS_PER_FORWARD = 1 << 26  # 256 MiB in fp32; one window is always allowed
_DENSE_MASK_BYTES = 8 + 1  # of a pair: an int64 distance, and whether its key is visible


class StepSize(NamedTuple):
    """Sizes of a step: tokens of a sequence, sequences of a micro-batch, micro-batches of a rank."""

    sequence_length: int
    micro_batch: int
    micro_batches: int


@dataclass(frozen=True)
class TrainOptions:
    """Settings of [train] that set a step's bytes and seconds. `trainable` is its phase's, () for all.

    asks_tasks: `evaluate.every_steps` is not 0.
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
    asks_tasks: bool = False

    @staticmethod
    def of(
        precision: Precision, train: Train, trainable: tuple[str, ...] = (), asks_tasks: bool = False
    ) -> "TrainOptions":
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
            asks_tasks,
        )


@dataclass(frozen=True, kw_only=True)
class MemoryColumns:
    """n trainings as columns [n]. Sizes are whole numbers in floats, so that products cannot overflow.

    Model: `mlp_matrices` is 3 for a gated MLP, else 2. `sequence`: tokens of a sample. Layout: `chunks`:
    pipeline stages of a rank, `shard`: ranks that ZeRO splits over, `zero`: 0 to 3.
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
    # As in `recipe/optimisers.py`.
    update_traffic_bytes: Column = _ZERO + ADAMW_TRAFFIC_BYTES
    update_flops: Column = _ZERO
    widened_bytes: Column = _ZERO
    whole_update_bytes: Column = _ZERO
    tied: Column  # 1 if head and embedding are tied
    # Counted for Kielo's own training by `activation_bytes.memory_columns`; 0 for other engines.
    compute_bytes: Column = _ZERO  # of a parameter in the precision of the compute, gathered from fp32 shards
    gathered_bytes: Column = _ZERO  # the same of a layer's parameter; 1 if matrices are gathered in 8 bits
    reduce_bytes: Column = _ZERO  # of a gradient that data-parallel ranks send
    frozen: Column = _ZERO  # share of the layers' parameters that are frozen
    layer_elements: Column = _ZERO  # of a layer's matrices on a tensor rank
    # On the first pipeline rank, and on the last if that is another rank with the head.
    first_parameters: Column = _ZERO
    last_parameters: Column = _ZERO
    first_layers: Column = _ZERO
    last_layers: Column = _ZERO
    # Passes of chunks at once on these ranks, if there are enough micro-batches.
    first_passes: Column = _ZERO
    last_passes: Column = _ZERO
    # Bytes of a token and layer from forward to backward, and bytes added while a layer is recomputed.
    kept_bytes: Column = _ZERO
    again_bytes: Column = _ZERO
    mask_bytes: Column = _ZERO  # of a micro-batch's dense masks and distances, of each pass
    logit_bytes: Column = _ZERO
    head_in_recipe: Column = _ZERO  # 1 if the head's logits and its input's gradient are in FP8
    loss_tokens: Column = _ZERO  # tokens whose logits exist at one time
    asked_tokens: Column = _ZERO  # of a batch of questions of tasks in training; 0: none

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, float]]) -> Self:
        """Make columns from rows that have a number for each field without a default."""
        rows = list(rows)
        columns = {}
        for field in fields(cls):
            has_default = field.default is not MISSING
            numbers = [row.get(field.name, field.default) if has_default else row[field.name] for row in rows]
            columns[field.name] = np.array(numbers, dtype=float)
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.hidden)

    def take(self, index: Column) -> Self:
        return type(self)(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    @property
    def tokens(self) -> Column:
        """Return the tokens of a micro-batch on a device, with 1 / tensor of the hidden columns if split."""
        return self.micro_batch * self.sequence / self.context


def memory_row(
    model: CompleteModel,
    layout: Layout,
    step: StepSize,
    train: TrainOptions,
    card: Accelerator | None = None,
    on_processor: bool = False,
) -> dict[str, float]:
    """Return a row for `MemoryColumns.of`: a complete `model` trained by Kielo.

    `layout` has no complaints, and `layout.shard` is not 0. card: the device's, None for a GPU of unknown
    memory. on_processor: count bytes as a rehearsal does.
    """
    device = "cpu" if on_processor else card.device if card else "cuda"
    if layout.compile is None and device == "cpu":  # where layers are not compiled unless asked
        layout = layout.model_copy(update={"compile": False})
    chunk_tokens = loss_chunk_tokens(train.loss_chunk_tokens, model, layout, card)
    schedule, is_pipeline = SCHEDULES[layout.pipeline_schedule], layout.pipeline > 1
    optimiser = OPTIMISERS[train.optimiser]
    own = memory_columns(
        model, layout, step.sequence_length, train.precision, chunk_tokens, on_processor, step.micro_batches
    )
    if train.hidden_dropout:
        own["kept_bytes"] += dropout_bytes(model, layout)
    if train.attention_dropout:
        own["kept_bytes"] += attention_dropout_bytes(model, layout, train.precision)
    if on_processor:
        biased = layout.model_copy(update={"alibi_kernel": "bias"})
        own["again_bytes"] += alibi_bytes(model, biased, train.precision, step.sequence_length, False)
    elif device != "cpu":
        is_compiled = compile_advice(layout) is None if layout.compile is None else layout.compile
        own["again_bytes"] += alibi_bytes(model, layout, train.precision, step.sequence_length, is_compiled)
    if layer_parts(model).has_alibi and (on_processor or layout.alibi_kernel == "bias"):
        own["mask_bytes"] = _DENSE_MASK_BYTES * step.sequence_length**2 / layout.context
    if train.precision == "fp8" and is_gathered_in_fp8(train.fp8, device):
        own["gathered_bytes"] -= fp8_share(model, train.fp8)
    row = {
        "hidden": model.hidden_size,
        "ffn": model.intermediate_size,
        "mlp_matrices": layer_parts(model).mlp_matrices,
        "vocabulary": model.vocab_rows,
        "sequence": step.sequence_length,
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "chunks": (layout.pipeline_stages_per_rank or schedule.stages_per_rank) if is_pipeline else 1,
        "context": layout.context,
        "shard": layout.shard * layout.context,
        "zero": layout.zero,
        "sequence_parallel": float(layout.sequence_parallel and layout.tensor > 1),
        "micro_batch": step.micro_batch,
        "micro_batches": step.micro_batches,
        "splits_backward": float(schedule.splits_backward and is_pipeline),
        "optimiser_bytes": optimiser.state_bytes(train.optimiser_state),
        "update_traffic_bytes": optimiser.traffic_bytes[train.optimiser_state],
        "update_flops": optimiser.flops,
        "widened_bytes": optimiser.widened_bytes[train.optimiser_state],
        "whole_update_bytes": optimiser.whole_update_bytes,
        "tied": float(model.tie_word_embeddings),
        "head_in_recipe": float(train.precision == "fp8" and train.fp8.head),
        "reduce_bytes": {"fp32": 4, "bf16": 2}[train.gradient_reduce_dtype],
        "frozen": frozen_share(model, train.trainable),
    }
    if train.asks_tasks:
        row["asked_tokens"] = asked_tokens(model, step.sequence_length)
    return row | own


def asked_tokens(model: CompleteModel, sequence_length: int) -> int:
    """Return the tokens of the largest batch of questions, one of which can be a whole sequence."""
    return max(sequence_length, min(MOST_TOKENS_PER_FORWARD, MOST_LOGITS_PER_FORWARD // model.vocab_size))
