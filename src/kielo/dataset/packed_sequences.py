"""Sequences of packed documents: (sequence, epoch) → the pieces of documents in it.

The pack stage writes these for each source and each sequence length of the run (`pack_sequences.py`):

SOURCE.LENGTH.table.npy    which lengths of pieces are in which sequence
SOURCE.LENGTH.pieces.npy   the pieces by length, in the stream's order: 4 · first token + 2 · begins + ends

Pieces of equal length change places from epoch to epoch, and the pieces of a sequence are in a random order:
a document meets other documents in each epoch, and short documents are not always last. Both are keyed by
seed, source, length and epoch, so nothing is stored, and any rank reads any sequence.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kielo.artifact.manifest import Manifest, check_sizes, hash_manifest, read_manifest
from kielo.artifact.stage_counts import PackingCounts
from kielo.artifact.stage_json import counts_of
from kielo.dataset.order import key_from, keys_of_epochs, permute, scramble
from kielo.recipe.errors import KieloError

# Columns of a table: the group's first sequence, a length of its pieces, the number of such pieces in each
# sequence, and the number of the first of them among all pieces of that length.
FIRST_SEQUENCE, LENGTH, TIMES, FIRST_PIECE = range(4)
FOLDER = "packing"  # beside the folder of the tokens
PACKING = "packing"  # of the section in its manifest; missing: best_fit
BEGINS, ENDS, FLAG_BITS = 2, 1, 2  # of an entry of pieces: the piece has its document's first, its last token


@dataclass(frozen=True)
class _Part:
    """Pieces of one length in a group: `times` in each sequence, from `first` on. before: longer pieces."""

    length: int
    times: int
    first: int
    before: "_Part | None"


@dataclass(frozen=True)
class _Group:
    count: int
    parts: _Part | None

    def split(self, count: int) -> "tuple[_Group, _Group]":
        return _Group(count, self.parts), _Group(self.count - count, _after(self.parts, count))

    def with_part(self, length: int, times: int, first: int) -> "_Group":
        return _Group(self.count, _Part(length, times, first, self.parts))


def _after(part: _Part | None, sequences: int) -> _Part | None:
    if part is None:
        return None
    first = part.first + sequences * part.times
    return _Part(part.length, part.times, first, _after(part.before, sequences))


@dataclass
class _Groups:
    """The groups by the room in their sequences, in tokens. Of groups with equal room the oldest is first."""

    by_room: dict[int, deque[_Group]] = field(default_factory=dict)
    rooms: list[int] = field(default_factory=list)  # sorted

    def add(self, room: int, group: _Group, is_oldest: bool = False) -> None:
        if not group.count:
            return
        if room not in self.by_room:
            insort(self.rooms, room)
            self.by_room[room] = deque()
        self.by_room[room].insert(0 if is_oldest else len(self.by_room[room]), group)

    def take_tightest(self, length: int) -> tuple[int, _Group] | None:
        """Remove and return (room, group) with the least room of at least `length`, the oldest, or None."""
        place = bisect_left(self.rooms, length)
        if place == len(self.rooms):
            return None
        room = self.rooms[place]
        group = self.by_room[room].popleft()
        if not self.by_room[room]:
            del self.by_room[room], self.rooms[place]
        return room, group

    def __iter__(self) -> Iterator[_Group]:
        for room in self.rooms:
            yield from self.by_room[room]


def best_fit_decreasing(counts: np.ndarray, sequence_length: int) -> tuple[np.ndarray, int]:
    """Pack counts[n] pieces of n tokens each, n = 1 .. sequence_length, into sequences. counts[0] is 0.

    Pieces are placed from the longest to the shortest, each into the sequence with the least room for it
    (Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv:2404.10830). Equal pieces, and
    sequences with the same content by length, are moved in groups, so seconds and memory depend on the
    sequence length only.

    Return a table int64 [parts, 4] (columns above), by first sequence, and the number of sequences. Sequence
    f + i of a group that begins at f has the pieces FIRST_PIECE + i * TIMES .. FIRST_PIECE + (i + 1) * TIMES
    - 1 of LENGTH. Of sequences with equal room, the first that had it takes the next piece. Seed and epoch
    choose the pieces of a length when a sequence is read.
    """
    groups = _Groups()
    for length in np.flatnonzero(counts)[::-1].tolist():
        _place(groups, length, int(counts[length]), sequence_length)
    rows, first = [], 0
    for group in groups:
        part = group.parts
        while part is not None:
            rows.append((first, part.length, part.times, part.first))
            part = part.before
        first += group.count
    return np.array(rows, dtype=np.int64).reshape(-1, 4), first


def one_a_sequence(counts: np.ndarray, sequence_length: int) -> tuple[np.ndarray, int]:
    """Put each piece into its own sequence; as `best_fit_decreasing`, the shortest pieces first."""
    lengths = np.flatnonzero(counts)
    first = np.cumsum(counts[lengths]) - counts[lengths]
    table = np.zeros((len(lengths), 4), np.int64)
    table[:, FIRST_SEQUENCE], table[:, LENGTH], table[:, TIMES] = first, lengths, 1
    return table, int(counts.sum())


def _place(groups: _Groups, length: int, count: int, sequence_length: int) -> None:
    placed = 0
    while placed < count:
        # It keeps the least room while another piece fits, so it takes as many as possible first.
        room, group = groups.take_tightest(length) or (sequence_length, _Group(count - placed, None))
        times = room // length
        full, others = group.split(min(group.count, (count - placed) // times))
        groups.add(room - times * length, full.with_part(length, times, placed))
        placed += full.count * times
        if placed < count and others.count:  # too few pieces are left for another such sequence
            last, others = others.split(1)
            groups.add(room - (count - placed) * length, last.with_part(length, count - placed, placed))
            placed = count
        if group.parts is not None:
            groups.add(room, others, is_oldest=True)


@dataclass(frozen=True)
class Pieces:
    """The pieces of documents in sequences; [p] each."""

    row: np.ndarray  # number of the sequence in the request
    column: np.ndarray  # place of the piece's first token
    start: np.ndarray  # of the piece in the source's stream
    count: np.ndarray
    begins: np.ndarray  # has its document's first token
    ends: np.ndarray  # has its document's last token


class PackedSequences:
    """The sequences of one source at one length. Pieces are mapped. An epoch has `num_sequences`."""

    def __init__(self, tokens_folder: Path | str, source: str, sequence_length: int, seed: int):
        folder, manifest = packing_folder(tokens_folder), packing_manifest(tokens_folder)
        made = counts_of(folder, manifest, PackingCounts).sources.get(source, {}).get(str(sequence_length))
        if made is None:
            raise _not_packed(folder, f"has no sequences of {sequence_length:,} tokens of {source}")
        table_path, pieces_path = (folder / name for name in file_names(source, sequence_length))
        check_sizes(folder, manifest, [table_path.name, pieces_path.name])
        self._table = table = np.load(table_path, allow_pickle=False)
        self._pieces = np.load(pieces_path, mmap_mode="r", allow_pickle=False)
        self.num_sequences = made.sequences
        self._first_sequence, self._first_part = np.unique(table[:, FIRST_SEQUENCE], return_index=True)
        self._num_parts = np.diff(self._first_part, append=len(table))
        sizes = np.diff(self._first_sequence, append=self.num_sequences)
        self._of_length = np.zeros(sequence_length + 2, np.int64)
        np.add.at(self._of_length, table[:, LENGTH], table[:, TIMES] * np.repeat(sizes, self._num_parts))
        self._before_length = np.cumsum(self._of_length) - self._of_length
        self._piece_key = np.uint64(key_from("pieces", seed, source, sequence_length))
        self._place_key = np.uint64(key_from("places", seed, source, sequence_length))

    def pieces(self, sequence: np.ndarray, epoch: np.ndarray) -> Pieces:
        row, length, number = self._slots(sequence)
        # A shuffle for each length and epoch.
        key = keys_of_epochs(keys_of_epochs(self._piece_key, length), epoch[row])
        chosen = self._before_length[length] + permute(number, self._of_length[length], key)
        entry = np.asarray(self._pieces[chosen])
        key = keys_of_epochs(keys_of_epochs(self._place_key, sequence[row]), epoch[row])
        place = np.arange(len(row)) - np.searchsorted(row, row)
        order = np.lexsort((scramble(key + place.astype(np.uint64)), row))
        length, entry = length[order], entry[order]  # rows are sorted already
        end = np.cumsum(length)
        first = np.searchsorted(row, row)
        column = end - length - (end - length)[first]
        begins, ends = (entry & BEGINS) > 0, (entry & ENDS) > 0
        return Pieces(row, column, entry >> FLAG_BITS, length, begins, ends)

    def _slots(self, sequence: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (row, length, number among the pieces of its length) of each piece, int64 [p], by row."""
        group = np.searchsorted(self._first_sequence, sequence, side="right") - 1
        row, part = _expanded(self._first_part[group], self._num_parts[group])
        times = self._table[part, TIMES]
        inside = (sequence - self._first_sequence[group])[row]
        first = self._table[part, FIRST_PIECE] + inside * times
        which, number = _expanded(first, times)
        return row[which], self._table[part, LENGTH][which], number


def _expanded(first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (i, first[i] + k) for each i and each k below count[i]; int64 [sum of count] each."""
    which = np.repeat(np.arange(len(first)), count)
    return which, np.arange(len(which)) + (first - np.cumsum(count) + count)[which]


@dataclass(frozen=True)
class PackingRow:
    source: str
    sequence_length: int
    sequences: int
    cut: float  # share of the documents
    cut_in_one_stream: float  # share that a single stream would cut
    filling: float  # share of the positions without a token

    def sentence(self) -> str:
        return (
            f"{self.source}: {self.sequences:,} sequences of {self.sequence_length:,} tokens, "
            f"{self.cut:.2%} of the documents cut ({self.cut_in_one_stream:.2%} in one stream), "
            f"{self.filling:.3%} filling"
        )


def packing_rows(manifest: Manifest) -> list[PackingRow]:
    rows = []
    for source, lengths in counts_of(FOLDER, manifest, PackingCounts).sources.items():
        for length, of in lengths.items():
            cut, in_one = (count / max(1, of.documents) for count in (of.cut_documents, of.cut_in_one_stream))
            filling = of.filling / max(1, of.sequences * int(length))
            rows.append(PackingRow(source, int(length), of.sequences, cut, in_one, filling))
    return rows


def entries(first: np.ndarray, begins: np.ndarray, ends: np.ndarray | bool) -> np.ndarray:
    return first << FLAG_BITS | np.where(begins, BEGINS, 0) | np.where(ends, ENDS, 0)


def file_names(source: str, sequence_length: int) -> tuple[str, str]:
    return f"{source}.{sequence_length}.table.npy", f"{source}.{sequence_length}.pieces.npy"


def packing_folder(tokens_folder: Path | str) -> Path:
    return Path(tokens_folder).parent / FOLDER


def packing_manifest(tokens_folder: Path | str) -> Manifest:
    folder = packing_folder(tokens_folder)
    if (manifest := read_manifest(folder)) is None:
        raise _not_packed(folder, "has no packed sequences")
    if manifest.inputs["tokens"] != hash_manifest(tokens_folder):
        raise _not_packed(folder, f"was packed from other tokens than {tokens_folder}")
    return manifest


def _not_packed(folder: Path, what: str) -> KieloError:
    return KieloError(f"{folder}: {what}, as dataset.packing needs. Fix: `kielo run RECIPE --to pack`")
