"""A tensor whose parts are in several places: a shard of each rank of another engine, or one whole file.

A part is any view of a file's bytes. So cutting, joining and transposing only move places, and the numbers
are read once, into the target, whatever the layout.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Self

from torch import Tensor

from kielo.checkpoint.tensor_file import ReadBuffers, TensorFile, Wanted
from kielo.checkpoint.tensor_table import DTYPES, StoredTensor, whole_box


@dataclass(frozen=True)
class FilePart:
    """A view of a file's bytes, which is the box of the whole tensor that begins at `first`."""

    path: Path
    stored: StoredTensor
    first: tuple[int, ...]

    def cut(self, box: Sequence[slice]) -> "FilePart | None":
        """Return the part inside the box, with its place in the box; None if they do not overlap."""
        item_bytes, begin = DTYPES[self.stored.dtype].itemsize, self.stored.begin
        first, shape = list[int](), list[int]()
        sides = zip(box, self.first, self.stored.shape, self.stored.strides, strict=True)
        for side, start, size, stride in sides:
            low, high = max(side.start, start), min(side.stop, start + size)
            if low >= high:
                return None
            begin += (low - start) * stride * item_bytes
            first.append(low - side.start)
            shape.append(high - low)
        return replace(self, stored=replace(self.stored, begin=begin, shape=tuple(shape)), first=tuple(first))


@dataclass(frozen=True)
class SplitTensor:
    """A tensor and the parts that make it up, in any number of files."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[FilePart, ...]

    @classmethod
    def of_file(cls, path: Path, stored: StoredTensor) -> Self:
        return cls(stored.dtype, stored.shape, (FilePart(path, stored, (0,) * len(stored.shape)),))

    @property
    def path(self) -> Path:
        """The first of its files."""
        return self.parts[0].path

    @property
    def mT(self) -> "SplitTensor":  # noqa: N802 - torch's name
        """Return the tensor with its last two dimensions exchanged."""
        parts = tuple(_viewed(part, _turned) for part in self.parts)
        return SplitTensor(self.dtype, _turned(self.shape), parts)

    def box(self, box: Sequence[slice]) -> "SplitTensor":
        """Return the box (a slice with bounds for each dimension) as a tensor of its own."""
        parts = tuple(cut for part in self.parts if (cut := part.cut(box)) is not None)
        return SplitTensor(self.dtype, tuple(side.stop - side.start for side in box), parts)

    def rows(self, start: int, stop: int) -> "SplitTensor":
        return self.box((slice(start, stop), *whole_box(self.shape[1:])))

    def every(self, step: int, first: int) -> "SplitTensor":
        """Return each `step`-th row from `first` on, of a tensor with one part."""
        (part,) = self.parts
        shape = (self.shape[0] // step, *self.shape[1:])
        begin = part.stored.begin + first * part.stored.strides[0] * DTYPES[self.dtype].itemsize
        strides = (part.stored.strides[0] * step, *part.stored.strides[1:])
        stored = StoredTensor(self.dtype, shape, begin, strides)
        return SplitTensor(self.dtype, shape, (replace(part, stored=stored),))

    def index(self, number: int) -> "SplitTensor":
        """Return one entry of the first dimension, without this dimension."""
        parts = tuple(_viewed(part, _without_first) for part in self.rows(number, number + 1).parts)
        return SplitTensor(self.dtype, self.shape[1:], parts)

    def is_whole(self) -> bool:
        """Return True if the parts, which do not overlap, fill the tensor."""
        return sum(math.prod(part.stored.shape) for part in self.parts) == math.prod(self.shape)

    def wanted(self, box: Sequence[slice], target: Tensor) -> Iterator[tuple[Path, Wanted]]:
        """Yield what to read so that `target` gets the box."""
        for part in self.parts:
            if (inside := part.cut(box)) is None:
                continue
            sides = zip(inside.first, inside.stored.shape, strict=True)
            place = tuple(slice(start, start + size) for start, size in sides)
            yield part.path, Wanted(inside.stored, whole_box(inside.stored.shape), target[place])


def joined(tensors: Sequence[SplitTensor], dim: int) -> SplitTensor:
    """Join tensors along a dimension."""
    parts, place = list[FilePart](), 0
    for one in tensors:
        for part in one.parts:
            first = list(part.first)
            first[dim] += place
            parts.append(replace(part, first=tuple(first)))
        place += one.shape[dim]
    shape = list(tensors[0].shape)
    shape[dim] = place
    return assembled(tensors[0].dtype, tuple(shape), parts)


def assembled(dtype: str, shape: tuple[int, ...], parts: Iterable[FilePart]) -> SplitTensor:
    """Return the tensor of `parts`, with parts as one if their rows follow each other in a file."""
    merged = list[FilePart]()
    for part in sorted(parts, key=attrgetter("first")):
        if merged and (one := _merged(merged[-1], part)) is not None:
            merged[-1] = one
        else:
            merged.append(part)
    return SplitTensor(dtype, shape, tuple(merged))


def _merged(one: FilePart, two: FilePart) -> FilePart | None:
    if not one.first or one.path != two.path or one.first[1:] != two.first[1:]:
        return None
    stored, rows = one.stored, one.stored.shape[0]
    begin = stored.begin + rows * stored.strides[0] * DTYPES[stored.dtype].itemsize
    follows = replace(stored, begin=begin, shape=(two.stored.shape[0], *stored.shape[1:]))
    if follows != two.stored or two.first[0] != one.first[0] + rows:
        return None
    return replace(one, stored=replace(stored, shape=(rows + two.stored.shape[0], *stored.shape[1:])))


def read_parts(wanted: Iterable[tuple[Path, Wanted]], buffers: ReadBuffers | None = None) -> None:
    """Fill every target, each file in the order of its bytes."""
    for path, of_file in groupby(sorted(wanted, key=itemgetter(0)), itemgetter(0)):
        with TensorFile(path, {}, buffers) as file:
            file.read(one for _, one in of_file)


def _viewed(part: FilePart, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> FilePart:
    stored = part.stored
    stored = replace(stored, shape=change(stored.shape), strides=change(stored.strides))
    return replace(part, stored=stored, first=change(part.first))


def _without_first(values: tuple[int, ...]) -> tuple[int, ...]:
    return values[1:]


def _turned(values: tuple[int, ...]) -> tuple[int, ...]:
    return (*values[:-2], *values[:-3:-1])
