"""Batches: token shards + order + (step, data rank, data ranks) → its inputs and labels.

A step of G sequences is G global samples in a row. Rank r of n takes samples r, r + n, … of the step, so
every number of ranks sees the same samples in the same step. A sequence is tokens i*s .. i*s+s of its
source's stream, the last filled up with end-of-text and labels that do not count. With best-fit packing a
sequence is made of pieces of documents (`packed_sequences.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self, TypeVar

import numpy as np

from kielo.artifact.manifest import Manifest, check_sizes, read_manifest
from kielo.artifact.stage_counts import PackCounts
from kielo.artifact.stage_json import counts_of, read_stage_json
from kielo.artifact.token_set import TokenSet
from kielo.artifact.token_shards import LOSS_MASK, TokenShard
from kielo.artifact.token_sources import TokenFiles, check_unchanged
from kielo.dataset.order import Located, Order, OrderSource, Phase, key_from, keys_of_epochs
from kielo.dataset.packed_sequences import PackedSequences, Pieces
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import PACKED, Packing

Shard = TokenShard | TokenSet
Numbers = TypeVar("Numbers", bound="_Integers")
NOT_COUNTED = -100  # PyTorch's and Hugging Face's label for "no loss here"


@dataclass(frozen=True)
class Batch:
    """One rank's n sequences of one step, of s tokens each."""

    inputs: np.ndarray  # int64 [n, s]
    labels: np.ndarray  # int64 [n, s], the next token or -100
    # int32 [n, s], the document's number inside its sequence (0, 1, …), or `causal_documents` of it.
    documents: np.ndarray | None
    samples: np.ndarray  # int64 [n], global sample numbers
    dropout_keys: np.ndarray | None = None  # int32 [n, 2]
    # bool [n], whether the first token of a sequence, which no label is, carries loss. None: all do.
    first_counts: np.ndarray | None = None


class _Integers(Protocol):
    def __invert__(self) -> Self: ...


class PhaseSteps(Protocol):
    """The fields of a phase that its batches need (`resolve.resolved.PlannedPhase`)."""

    @property
    def number(self) -> int: ...
    @property
    def first_step(self) -> int: ...
    @property
    def last_step(self) -> int: ...
    @property
    def first_sample(self) -> int: ...
    @property
    def order_first_sample(self) -> int: ...
    @property
    def sequence_length(self) -> int: ...
    @property
    def sequences_per_step(self) -> int: ...
    @property
    def mixture(self) -> Mapping[str, float]: ...
    @property
    def packing(self) -> Packing: ...
    @property
    def offsets(self) -> Mapping[str, int]: ...


class Batches:
    """The batches of a phase, each computed on request. Raises KieloError for a folder that is not packed."""

    def __init__(
        self,
        folder: Path | str,
        seed: int,
        phase: PhaseSteps,
        longest_sequence_length: int,
        end_of_text_id: int,
        mask_documents: bool,
    ):
        self.folder, self.phase, self.mask_documents = Path(folder), phase, mask_documents
        counts = packed_counts(self.folder).sources
        for name in phase.mixture:
            if name not in counts:
                raise KieloError(f"the mixture's {name}: {self.folder} has the sources {', '.join(counts)}")
        # By name, so that the order in a recipe does not change the order of the data.
        self.names = sorted(phase.mixture)
        self.shards = [open_shard(self.folder, name) for name in self.names]
        length, longest = phase.sequence_length, longest_sequence_length
        self._reader: _StreamReader | _PackedReader
        if phase.packing in PACKED:
            longest = length  # single sequences are shuffled
            packed = [PackedSequences(folder, name, length, seed) for name in self.names]
            num_tokens = [one.num_sequences * length for one in packed]
            self._reader = _PackedReader(self.shards, packed, length, end_of_text_id, mask_documents)
        else:
            is_as_is = phase.packing == "as_is"
            longest = length if is_as_is else longest
            num_tokens = [
                shard.num_tokens // length * length if is_as_is else shard.num_tokens - 1
                for shard in self.shards
            ]
            self._reader = _StreamReader(self.shards, length, end_of_text_id, mask_documents, is_as_is)
        first, is_shuffled = phase.order_first_sample, phase.packing != "as_is"
        counted = zip(self.names, num_tokens, strict=True)
        self.order = Order(
            seed,
            Phase(phase.number, first, length, longest, phase.offsets, is_shuffled),
            [OrderSource(name, tokens, phase.mixture[name]) for name, tokens in counted],
        )

    def step(self, step: int, data_rank: int, data_ranks: int) -> Batch:
        """Return the sequences of `data_rank`, one of `data_ranks`, at `step` (from 1). There may be none."""
        return self.read(self.samples(step, data_rank, data_ranks))

    def read(self, samples: np.ndarray) -> Batch:
        """Return the sequences of global sample numbers, int64 [n]. Raises OSError if a file fails."""
        return self._reader.read(samples, self.order.locate(samples))

    def ranges(self, located: Located) -> list[list[tuple[int, int]]]:
        """Return (first token, tokens) of the parts of the source's stream in each sequence, in order."""
        return self._reader.ranges(located)

    def samples(self, step: int, data_rank: int = 0, data_ranks: int = 1) -> np.ndarray:
        phase, sequences = self.phase, self.phase.sequences_per_step
        if not phase.first_step <= step <= phase.last_step or not 0 <= data_rank < data_ranks:
            raise ValueError(
                f"step {step} of rank {data_rank} of {data_ranks}: the phase has steps {phase.first_step} to "
                f"{phase.last_step}, and ranks count from 0"
            )
        first = phase.first_sample + (step - phase.first_step) * sequences
        return np.arange(first + data_rank, first + sequences, data_ranks, dtype=np.int64)


def causal_documents(numbers: Numbers) -> Numbers:
    """Return -1, -2, … for 0, 1, …: the numbers of documents in which a token sees only earlier tokens."""
    return ~numbers


def filled_up(batch: Batch, sequences: int, end_of_text_id: int) -> Batch:
    """Return the batch with `sequences`, filled up with end-of-text and labels that do not count."""
    missing = sequences - len(batch.inputs)
    if missing <= 0:
        return batch
    fillings = {"inputs": end_of_text_id, "labels": NOT_COUNTED, "documents": 0, "dropout_keys": 0}
    padded = {
        name: np.pad(getattr(batch, name), ((0, missing), (0, 0)), constant_values=filling)
        for name, filling in fillings.items()
        if getattr(batch, name) is not None
    }
    return replace(batch, **padded)


def with_dropout_keys(batch: Batch, seed: int) -> Batch:
    """Return the batch with the keys of its samples. A run has each sample once, so keys differ by step."""
    keys = keys_of_epochs(np.uint64(key_from(seed, "dropout")), batch.samples)
    return replace(batch, dropout_keys=keys.view(np.int32).reshape(-1, 2))


def shard_batch(
    shard: Shard, sequences: np.ndarray, sequence_length: int, mask_documents: bool = False
) -> Batch:
    """Return the `sequences`, int64 [n], of a shard that the pack stage wrote. They are the `samples`."""
    end = int(shard.read(shard.num_tokens - 1, 1)[0])  # every document ends with it
    reader = _StreamReader([shard], sequence_length, end, mask_documents)
    zeros = np.zeros_like(sequences)
    return reader.read(sequences, Located(zeros, zeros, sequences, zeros))


def document_numbers(shard: TokenShard, start_token: int, count: int) -> np.ndarray:
    offsets = shard.document_offsets
    first, last = np.searchsorted(offsets, [start_token, start_token + count - 1], side="right") - 1
    numbers = np.arange(first, last + 1)
    ends = np.minimum(offsets[numbers + 1], start_token + count)
    return np.repeat(numbers, ends - np.maximum(offsets[numbers], start_token))


def packed_manifest(folder: Path | str) -> Manifest:
    if (manifest := read_manifest(folder)) is None:
        raise KieloError(f"{folder}: the pack stage is not finished. Fix: `kielo run RECIPE --to pack`")
    return manifest


def packed_counts(folder: Path | str) -> PackCounts:
    return counts_of(folder, packed_manifest(folder), PackCounts)


def open_shard(folder: Path | str, name: str) -> Shard:
    """Open a source's shard in a tokens folder, or its files read in place, unless they changed."""
    manifest = packed_manifest(folder)
    is_text_alone = TokenFiles.FILE_NAME not in manifest.files
    of = None if is_text_alone else counts_of(folder, manifest, PackCounts).sources.get(name)
    if of is not None and of.folder is not None:
        described = read_stage_json(folder, TokenFiles)
        if described is None:
            raise KieloError(f"{Path(folder) / TokenFiles.FILE_NAME}: no such file. Fix: run pack again")
        files, place = described.sources[name], Path(of.folder)
        if of.times_ns is None:
            raise KieloError(
                f"{folder}: an earlier version of Kielo described the files of source {name}, without "
                "checksums. Fix: `kielo run RECIPE --to pack`, which reads them once"
            )
        check_unchanged(name, place, files.files, of.times_ns)
        return TokenSet(place, files.files, files.training_tokens, described.end_of_text_id)
    masks = {name + LOSS_MASK} & manifest.files.keys()
    parts = [f"{name}.bin", f"{name}.idx", *masks]
    check_sizes(folder, manifest, parts)
    return TokenShard(Path(folder) / name)


class _StreamReader:
    """Sequences of several shards' streams. is_blockwise: the last token of a sequence predicts nothing."""

    def __init__(
        self, shards: Sequence[Shard], length: int, end: int, mask_documents: bool, is_blockwise: bool = False
    ):
        self._is_blockwise = is_blockwise
        self._shards, self._length, self._end, self._mask_documents = shards, length, end, mask_documents
        self._whole = [shard.num_whole_sequences(length) for shard in shards]
        self._dtype = np.result_type(*(shard.dtype for shard in shards))

    def read(self, samples: np.ndarray, located: Located) -> Batch:
        source, sequence = located.source, located.sequence
        tokens = np.empty((len(samples), self._length + 1), self._dtype)
        documents = np.zeros((len(samples), self._length), np.int32) if self._mask_documents else None
        counts = np.full(len(samples), self._length)  # of each sequence's labels
        for number, shard in enumerate(self._shards):
            rows = np.flatnonzero(source == number)
            self._gather(tokens, counts, number, rows, sequence[rows])
            if documents is not None:  # 1 at each beginning of a document inside its row
                first = sequence[rows] * self._length
                which, token = shard.borders(first, counts[rows])
                places = rows[which] * self._length + token - first[which]
                np.add.at(documents.reshape(-1), places, 1)  # one without tokens begins with the next
        # The tokens are narrow until here: gathering moves a quarter of the bytes, one pass widens them.
        inputs, labels = tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)
        if self._is_blockwise:
            labels[:, -1] = NOT_COUNTED
        first_counts = located.seen_tokens == 0
        for at, number in enumerate(source.tolist()):
            if (mask := self._shards[number].loss_mask) is not None:
                start = int(sequence[at]) * self._length
                is_without = mask[start : start + self._length + 1] == 0
                labels[at, np.flatnonzero(is_without[1:])] = NOT_COUNTED
                first_counts[at] &= not is_without[0]
        for row in np.flatnonzero(counts < self._length):
            inputs[row, counts[row] :], labels[row, counts[row] :] = self._end, NOT_COUNTED
            if documents is not None:
                documents[row, counts[row]] += 1  # the filling is no part of the last document
        if documents is not None:
            np.cumsum(documents, axis=1, out=documents)
        for row in np.flatnonzero(located.seen_tokens):  # at most one of each source, at a phase's start
            labels[row, : located.seen_tokens[row]] = NOT_COUNTED
        return Batch(inputs, labels, documents, samples, first_counts=first_counts)

    def ranges(self, located: Located) -> list[list[tuple[int, int]]]:
        starts = (located.sequence * self._length).tolist()
        return [
            [(start, min(self._length, self._shards[source].num_tokens - 1 - start))]
            for source, start in zip(located.source.tolist(), starts, strict=True)
        ]

    def _gather(
        self, tokens: np.ndarray, counts: np.ndarray, number: int, rows: np.ndarray, sequence: np.ndarray
    ) -> None:
        """Copy sequences of one shard, with the token after each, into rows of `tokens` [n, s + 1]."""
        whole, shard = self._whole[number], self._shards[number]
        is_whole = sequence < whole
        tokens[rows[is_whole]] = shard.sequences(sequence[is_whole], self._length)
        for row in rows[~is_whole]:  # only a shard's last sequence is shorter
            rest = shard.read(start := whole * self._length, shard.num_tokens - start)
            tokens[row, : len(rest)] = rest
            counts[row] = len(rest) - 1  # the last token is a label only


class _PackedReader:
    """Sequences of `length` tokens, made of pieces of several shards' documents by best-fit packing.

    The label of a token is the next token of its sequence. At a cut it is the document's next token, which
    begins another sequence. At a document's end there is none if nothing follows, or if the middle of another
    document follows. end: the id that fills up a sequence.
    """

    def __init__(
        self, shards: list[Shard], packed: list[PackedSequences], length: int, end: int, mask_documents: bool
    ):
        self._shards, self._packed, self._length = shards, packed, length
        self._end, self._mask_documents = end, mask_documents

    def read(self, samples: np.ndarray, located: Located) -> Batch:
        shape = (len(samples), self._length)
        inputs, labels = np.full(shape, self._end, np.int64), np.full(shape, NOT_COUNTED, np.int64)
        documents = np.zeros(shape, np.int32) if self._mask_documents else None
        first_counts = np.ones(len(samples), bool)
        for rows, shard, pieces in self._pieces(located):
            row = rows[pieces.row]
            _copy_pieces(inputs, labels, shard, row, pieces)
            joins = pieces.begins & (pieces.column > 0)
            at, column = row[joins], pieces.column[joins]
            labels[at, column - 1] = inputs[at, column]
            if shard.loss_mask is not None:
                without = shard.loss_mask[pieces.start[joins]] == 0
                labels[at[without], column[without] - 1] = NOT_COUNTED
                leads = pieces.column == 0
                first_counts[row[leads]] = shard.loss_mask[pieces.start[leads]] != 0
            if documents is not None:
                ends = pieces.column + pieces.count  # where the next piece or the filling begins
                inside = ends < self._length
                documents[row[inside], ends[inside]] = 1
        if documents is not None:
            np.cumsum(documents, axis=1, out=documents)
        return Batch(inputs, labels, documents, samples, first_counts=first_counts)

    def ranges(self, located: Located) -> list[list[tuple[int, int]]]:
        found: list[list[tuple[int, int]]] = [[] for _ in located.source]
        for rows, _, pieces in self._pieces(located):
            for row, start, count in zip(rows[pieces.row], pieces.start, pieces.count, strict=True):
                found[row].append((int(start), int(count)))
        return found

    def _pieces(self, located: Located) -> Iterator[tuple[np.ndarray, Shard, Pieces]]:
        """Yield (rows of the batch, their shard, the pieces in them) of each source that has any."""
        for number, (shard, packed) in enumerate(zip(self._shards, self._packed, strict=True)):
            rows = np.flatnonzero(located.source == number)
            if len(rows):
                yield rows, shard, packed.pieces(located.sequence[rows], located.epoch[rows])


def _copy_pieces(
    inputs: np.ndarray, labels: np.ndarray, shard: Shard, row: np.ndarray, pieces: Pieces
) -> None:
    columns = (row, pieces.column, pieces.start, pieces.count, pieces.ends)
    for at, column, start, count, ends in zip(*(values.tolist() for values in columns), strict=True):
        tokens = shard.read(start, count if ends else count + 1)
        inputs[at, column : column + count] = tokens[:count]
        labels[at, column : column + len(tokens) - 1] = tokens[1:]
        if shard.loss_mask is not None:
            without = np.flatnonzero(shard.loss_mask[start + 1 : start + len(tokens)] == 0)
            labels[at, column + without] = NOT_COUNTED
