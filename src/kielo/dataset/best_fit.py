"""Best-fit-decreasing packing of pieces of documents: numbers of pieces by length -> sequences.

Ding et al. 2024 ("Fewer Truncations Improve Language Modeling", arXiv:2404.10830) take pieces from the
longest to the shortest, and put each into the sequence with the least room that holds it. Pieces of one
length are all alike, and so are sequences with the same content by length: here both are moved in groups. So
seconds and memory depend on the sequence length only, not on the number of documents.

The result is a table of lengths. Which piece of a length is where is chosen when a sequence is read, by seed
and epoch (`packed_sequences.py`): best-fit-decreasing says nothing of pieces of equal length.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

# Columns of a table: the group's first sequence; a length of its pieces; such pieces in each sequence; the
# number, among all pieces of that length, of the first of them.
FIRST_SEQUENCE, LENGTH, TIMES, FIRST_PIECE = range(4)


@dataclass(frozen=True)
class _Part:
    """Pieces of one length in the sequences of a group: `times` in each, from number `first` on.

    before: the longer pieces of the same sequences.
    """

    length: int
    times: int
    first: int
    before: "_Part | None"


@dataclass(frozen=True)
class _Group:
    """`count` sequences with the same content by length."""

    count: int
    parts: _Part | None

    def split(self, count: int) -> "tuple[_Group, _Group]":
        """Returns the first `count` sequences and the others."""
        return _Group(count, self.parts), _Group(self.count - count, _after(self.parts, count))

    def with_part(self, length: int, times: int, first: int) -> "_Group":
        return _Group(self.count, _Part(length, times, first, self.parts))


def _after(part: _Part | None, sequences: int) -> _Part | None:
    """Returns the parts of a group's sequences from number `sequences` on."""
    if part is None:
        return None
    first = part.first + sequences * part.times
    return _Part(part.length, part.times, first, _after(part.before, sequences))


@dataclass
class _Groups:
    """The groups by the room that is left in their sequences, in tokens; of equal room the oldest first."""

    by_room: dict[int, deque[_Group]] = field(default_factory=dict)
    rooms: list[int] = field(default_factory=list)  # sorted

    def add(self, room: int, group: _Group) -> None:
        if group.count:
            self._of(room).append(group)

    def put_back(self, room: int, group: _Group) -> None:
        if group.count:
            self._of(room).appendleft(group)

    def take_tightest(self, length: int) -> tuple[int, _Group] | None:
        """Takes out (room, group) with the least room of at least `length`, the oldest; None for none."""
        place = bisect_left(self.rooms, length)
        if place == len(self.rooms):
            return None
        room = self.rooms[place]
        group = self.by_room[room].popleft()
        if not self.by_room[room]:
            del self.by_room[room], self.rooms[place]
        return room, group

    def _of(self, room: int) -> deque[_Group]:
        if room not in self.by_room:
            insort(self.rooms, room)
            self.by_room[room] = deque()
        return self.by_room[room]

    def __iter__(self) -> Iterator[_Group]:
        for room in self.rooms:
            yield from self.by_room[room]


def best_fit_decreasing(counts: np.ndarray, sequence_length: int) -> tuple[np.ndarray, int]:
    """Packs counts[n] pieces of n tokens each, n = 1 .. sequence_length, into sequences; counts[0] is 0.

    Returns a table int64 [parts, 4] (columns above), by first sequence, and the number of sequences.
    Sequences count from 0, and those of a group have the same pieces by length: sequence f + i of a group
    that begins at f has the pieces FIRST_PIECE + i * TIMES .. FIRST_PIECE + (i + 1) * TIMES - 1 of LENGTH.
    Of sequences with equal room, that which has had this room for longest takes the next piece.
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
    """Puts each piece into a sequence of its own; as `best_fit_decreasing`, the shortest pieces first."""
    lengths = np.flatnonzero(counts)
    first = np.cumsum(counts[lengths]) - counts[lengths]
    table = np.zeros((len(lengths), 4), np.int64)
    table[:, FIRST_SEQUENCE], table[:, LENGTH], table[:, TIMES] = first, lengths, 1
    return table, int(counts.sum())


def _place(groups: _Groups, length: int, count: int, sequence_length: int) -> None:
    """Places `count` pieces of one length, in open sequences first.

    A sequence with the least room stays the one with the least room while it holds another piece, so it takes
    as many as it can before the next sequence takes any.
    """
    placed = 0
    while placed < count:
        room, group = groups.take_tightest(length) or (sequence_length, _Group(count - placed, None))
        times = room // length
        full, others = group.split(min(group.count, (count - placed) // times))
        groups.add(room - times * length, full.with_part(length, times, placed))
        placed += full.count * times
        if placed < count and others.count:  # the last piece or pieces fill no sequence as the others do
            last, others = others.split(1)
            groups.add(room - (count - placed) * length, last.with_part(length, count - placed, placed))
            placed = count
        if group.parts is not None:
            groups.put_back(room, others)
