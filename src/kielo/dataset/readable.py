"""The sequences of a step that can be read: those that cannot are found one by one, and left empty.

A cut, missing or failing file raises OSError (`artifact/token_file.py`), and a damaged one may give ids that
the embedding has no row for. An empty sequence is end-of-text without a label that counts, as those are that
fill up a step, so that the step's loss and gradients are those of its other sequences.
"""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace

import numpy as np

from kielo.dataset.batches import NOT_COUNTED, Batch, Batches, Unreadable
from kielo.dataset.query import document_ids
from kielo.recipe.errors import KieloError, sentence


def read_sequences(batches: Batches, samples: np.ndarray, vocab_rows: int) -> Batch:
    """Reads samples [n]; `unreadable` of the batch are those whose rows hold nothing.

    vocab_rows: ids from it on are no rows of the embedding.
    """
    with suppress(OSError, KieloError):
        batch = batches.read(samples)
        if not _is_outside(batch, vocab_rows):
            return batch
    rows = [_read_one(batches, samples[at : at + 1], vocab_rows) for at in range(len(samples))]
    return Batch(
        np.concatenate([row.inputs for row in rows]),
        np.concatenate([row.labels for row in rows]),
        np.concatenate([row.documents for row in rows]) if batches.mask_documents else None,
        samples,
        unreadable=tuple(one for row in rows for one in row.unreadable),
        first_counts=np.concatenate([row.first_counts for row in rows]),
    )


def without_sequences(batch: Batch, samples: Collection[int], end_of_text_id: int) -> Batch:
    """Returns the batch with empty sequences in place of those of these samples."""
    rows = np.isin(batch.samples, list(samples))
    if not rows.any():
        return batch
    inputs, labels, documents = (
        None if array is None else array.copy() for array in (batch.inputs, batch.labels, batch.documents)
    )
    inputs[rows], labels[rows] = end_of_text_id, NOT_COUNTED
    if documents is not None:
        documents[rows] = 0
    return replace(batch, inputs=inputs, labels=labels, documents=documents)


def _read_one(batches: Batches, sample: np.ndarray, vocab_rows: int) -> Batch:
    """Reads one sample; where it cannot be read, its row holds zeros, and `unreadable` says why."""
    try:
        batch = batches.read(sample)
    except (OSError, KieloError) as error:
        reason = sentence(error) or str(error)
    else:
        if not _is_outside(batch, vocab_rows):
            return batch
        ids = np.concatenate([batch.inputs[0], batch.labels[0]])
        reason = f"has ids up to {ids.max():,}, but the vocabulary has {vocab_rows:,} rows"
    located = batches.order.locate(sample)
    (ranges,), source = batches.ranges(located), int(located.source[0])
    documents: list[str] = []
    with suppress(OSError, KieloError):
        documents = document_ids(batches, source, ranges)
    shape = (1, batches.phase.sequence_length)
    found = Unreadable(
        int(sample[0]), batches.names[source], tuple(map(tuple, ranges)), tuple(documents), reason
    )
    numbers = np.zeros(shape, np.int32) if batches.mask_documents else None
    zeros = np.zeros(shape, np.int64)
    return Batch(zeros, zeros, numbers, sample, unreadable=(found,), first_counts=np.ones(1, bool))


def _is_outside(batch: Batch, vocab_rows: int) -> bool:
    """Returns True if the embedding or the head lacks a row for an id."""
    if not batch.inputs.size:
        return False
    inputs, labels = batch.inputs, batch.labels
    is_below = inputs.min() < 0 or ((labels < 0) & (labels != NOT_COUNTED)).any()
    return bool(is_below or max(inputs.max(), labels.max()) >= vocab_rows)
