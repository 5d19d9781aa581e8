"""`kielo train --dry-run`: what a training would do, without a step or a file."""

from pathlib import Path
from typing import Any

import numpy as np

from kielo.artifact.checkpoint_folder import step_folders, step_of
from kielo.dataset.batches import NOT_COUNTED, Batches
from kielo.recipe.cards import Accelerator, accelerator, accelerators
from kielo.recipe.sections import Precision
from kielo.resolve.memory import memory_bytes, usable_bytes
from kielo.resolve.memory_row import MemoryColumns, StepSize, TrainOptions, memory_row
from kielo.resolve.resolved import Resolved, filled


def dry_run(resolved: Resolved) -> dict[str, Any]:
    """Return steps, bytes and the first batch of a rank. Raises KieloError for unreadable tokens.

    "peak_bytes" is the planner's formula for the precision that needs most.
    """
    identity, placement = resolved.identity, resolved.placement
    card = accelerator(placement.accelerator) if placement.accelerator in accelerators() else None
    usable = usable_bytes(card) if card else None
    newest = step_folders(Path(placement.train_folder) / "checkpoints")
    return {
        "device": placement.device,
        "accelerator": placement.accelerator,
        "ranks": placement.world_size,
        "precision": identity.train.precision,
        "compile": placement.layout.compile,
        "steps": identity.total_steps,
        "tokens": identity.total_tokens,
        "goes_on_after_step": step_of(newest[0]) if newest else 0,
        "micro_batch_sequences": placement.phases[0].micro_batch_sequences,
        "micro_batches_per_step": placement.phases[0].micro_batches_per_step,
        "peak_bytes": _peak_bytes(resolved, card),
        "usable_bytes": int(usable) if usable else None,
        "first_batch": _first_batch(resolved),
    }


def _peak_bytes(resolved: Resolved, card: Accelerator | None) -> int:
    identity, placement = resolved.identity, resolved.placement
    train = identity.train
    first: Precision = filled(train.precision)
    precisions = dict.fromkeys([first, *(precision for _, precision in train.precision_changes)])
    rows = []
    for phase, placed in zip(identity.phases, placement.phases, strict=True):
        size = StepSize(phase.sequence_length, placed.micro_batch_sequences, placed.micro_batches_per_step)
        for precision in precisions:
            options = TrainOptions(
                precision,
                train.fp8,
                train.optimiser_state,
                placement.train.loss_chunk_tokens,
                train.gradient_reduce_dtype,
                trainable=phase.trainable,
                optimiser=train.optimiser,
                hidden_dropout=train.hidden_dropout,
                attention_dropout=train.attention_dropout,
            )
            rows.append(memory_row(identity.model, placement.layout, size, options, card))
    memory = memory_bytes(MemoryColumns.of(rows))
    return int(np.max(memory.peak("rehearsed" if placement.device == "cpu" else "reserved")))


def _first_batch(resolved: Resolved) -> dict[str, int]:
    identity, placement = resolved.identity, resolved.placement
    layout, phase = placement.layout, identity.phases[0]
    folder, end = Path(placement.tokens_folder), placement.end_of_text_id
    longest = identity.longest_sequence_length
    batches = Batches(folder, identity.seed, phase, longest, end, identity.dataset.mask_documents)
    batch = batches.step(1, data_rank=0, data_ranks=layout.replicate * layout.shard)
    return {
        "sequences": len(batch.inputs),
        "sequence_length": phase.sequence_length,
        "counted_tokens": int(np.count_nonzero(batch.labels != NOT_COUNTED)),
        "largest_token": int(batch.inputs.max()),
        "vocabulary": identity.model.vocab_size,
    }
