"""Batches: token shards + order + (step, data rank, data ranks) -> its inputs and labels.

A step of G sequences in a phase is G global samples in a row; rank r of n takes samples r, r+n, … of the step,
so every number of ranks sees the same samples in the same step. A sequence is tokens i*s .. i*s+s of its source's
stream; the last, shorter one is filled up with end-of-text and labels that do not count.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from kielo.artifact.manifest import read_manifest
from kielo.artifact.token_shards import TokenShard
from kielo.dataset.order import Order, OrderSource, Phase
from kielo.recipe.errors import KieloError

NOT_COUNTED = -100  # PyTorch's and Hugging Face's label for "no loss here"


@dataclass(frozen=True)
class Batch:
    """One rank's sequences of one step.

    inputs, labels: int64 [n, s], labels being the next token or -100; documents: int32 [n, s], the document's
    number inside its sequence (0, 1, …), or None; samples: int64 [n], global sample numbers.
    """

    inputs: np.ndarray
    labels: np.ndarray
    documents: np.ndarray | None
    samples: np.ndarray


class PhaseSteps(Protocol):
    """What a phase says of its data; `plan.resolved.Phase` has all of it."""

    number: int
    first_step: int
    last_step: int
    first_sample: int
    order_first_sample: int
    sequence_length: int
    sequences_per_step: int
    mixture: Mapping[str, float]
    offsets: Mapping[str, int]


class Batches:
    """Every step of a phase, computed when asked for: nothing is prefetched, nothing has to be restored.

    folder: of the pack stage. longest_sequence_length: of the whole run. Raises KieloError for a folder that is
    not packed or a mixture with an unknown source.
    """

    def __init__(
        self,
        folder: Path | str,
        seed: int,
        phase: PhaseSteps,
        longest_sequence_length: int,
        end_of_text_id: int,
        mask_documents: bool,
    ):
        self.folder, self.phase = Path(folder), phase
        self._end, self._mask_documents = end_of_text_id, mask_documents
        counts = _packed_counts(self.folder)["sources"]
        for name in phase.mixture:
            if name not in counts:
                raise KieloError(f"the mixture's {name}: {self.folder} has the sources {', '.join(counts)}")
        # By name, so that the order of lines in a recipe does not change the order of the data.
        self.names = sorted(phase.mixture)
        self.shards = [TokenShard(self.folder / name) for name in self.names]
        length, first = phase.sequence_length, phase.order_first_sample
        self.order = Order(
            seed,
            Phase(phase.number, first, length, longest_sequence_length, phase.offsets),
            [
                OrderSource(name, shard.num_tokens - 1, phase.mixture[name])
                for name, shard in zip(self.names, self.shards)
            ],
        )

    def step(self, step: int, data_rank: int, data_ranks: int) -> Batch:
        """The sequences of `data_rank`, one of `data_ranks`, at `step` (from 1).

        Raises KieloError when the ranks do not divide the sequences of a step.
        """
        located = self.order.locate(samples := self.samples(step, data_rank, data_ranks))
        length = self.phase.sequence_length
        batch = _empty_batch(samples, length, self._end, self._mask_documents)
        for row, (source, sequence) in enumerate(zip(located.source.tolist(), located.sequence.tolist())):
            _fill(batch, row, self.shards[source], sequence)
        batch.labels[np.arange(length) < located.seen_tokens[:, None]] = NOT_COUNTED
        return batch

    def samples(self, step: int, data_rank: int = 0, data_ranks: int = 1) -> np.ndarray:
        """Global sample numbers, int64 [n], of a rank at a step."""
        phase, sequences = self.phase, self.phase.sequences_per_step
        if not phase.first_step <= step <= phase.last_step or not 0 <= data_rank < data_ranks:
            raise ValueError(
                f"step {step} of rank {data_rank} of {data_ranks}: the phase has steps {phase.first_step} to "
                f"{phase.last_step}, and ranks count from 0"
            )
        if sequences % data_ranks:
            raise KieloError(
                f"{sequences} sequences a step cannot be shared by {data_ranks} data ranks; "
                f"make tokens_per_step a multiple of {data_ranks * phase.sequence_length}"
            )
        first = phase.first_sample + (step - phase.first_step) * sequences
        return np.arange(first + data_rank, first + sequences, data_ranks, dtype=np.int64)


def heldout_batch(
    folder: Path | str, sequence_length: int, max_sequences: int, mask_documents: bool = False
) -> Batch:
    """At most `max_sequences` sequences of the held-out text, at even distances through all of it, always the
    same.

    `samples` are sequence numbers of the held-out stream. Raises KieloError when nothing is held out.
    """
    counts = _packed_counts(Path(folder))
    if not counts["heldout"]["documents"]:
        raise KieloError(f"{folder}: no held-out text; raise dataset.heldout_share and pack again")
    shard = TokenShard(Path(folder) / "heldout")
    num_sequences = -(-(shard.num_tokens - 1) // sequence_length)
    chosen = min(num_sequences, max_sequences)
    sequences = np.arange(chosen, dtype=np.int64) * num_sequences // chosen
    end = int(shard.read(shard.num_tokens - 1, 1)[0])  # every document ends with it
    batch = _empty_batch(sequences, sequence_length, end, mask_documents)
    for row, sequence in enumerate(sequences.tolist()):
        _fill(batch, row, shard, sequence)
    return batch


def document_numbers(shard: TokenShard, start_token: int, count: int) -> np.ndarray:
    """Number in the shard, int64 [count], of the document that each token is of; end-of-text is its
    document's."""
    offsets = shard.document_offsets
    first, last = np.searchsorted(offsets, [start_token, start_token + count - 1], side="right") - 1
    numbers = np.arange(first, last + 1)
    ends = np.minimum(offsets[numbers + 1], start_token + count)
    return np.repeat(numbers, ends - np.maximum(offsets[numbers], start_token))


def _packed_counts(folder: Path) -> dict:
    manifest = read_manifest(folder)
    if manifest is None:
        raise KieloError(f"{folder}: the pack stage is not finished; `kielo run RECIPE --to pack` does it")
    return manifest.counts


def _empty_batch(samples: np.ndarray, sequence_length: int, end: int, mask_documents: bool) -> Batch:
    shape = (len(samples), sequence_length)
    documents = np.zeros(shape, np.int32) if mask_documents else None
    return Batch(np.full(shape, end, np.int64), np.full(shape, NOT_COUNTED, np.int64), documents, samples)


def _fill(batch: Batch, row: int, shard: TokenShard, sequence: int) -> None:
    length = batch.inputs.shape[1]
    start = sequence * length
    tokens = shard.read(start, min(length + 1, shard.num_tokens - start))
    count = len(tokens) - 1  # the last token has no next one: it is a label only
    batch.inputs[row, :count] = tokens[:-1]
    batch.labels[row, :count] = tokens[1:]
    if batch.documents is not None:
        numbers = document_numbers(shard, start, count)
        batch.documents[row, :count] = numbers - numbers[0]
        batch.documents[row, count:] = (
            numbers[-1] - numbers[0] + 1
        )  # the filling is no part of the last document
