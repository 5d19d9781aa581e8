"""64-bit hashes on disk in buckets by their highest bits, and the copies among the hashes of a bucket.

NAME.hashes has runs of RUN hashes: the hashes of a run by bucket, then their positions in the run (uint32).
NAME.npy has for each run where its buckets end. So a bucket of many parts is a few reads a part, and a worker
holds one run or one bucket: about HASHES_OF_BUCKET hashes, and more from MOST_BUCKETS of them on, or if one
hash recurs more often.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

RUN = 1 << 21
LEAST_BYTES_OF_LINE, LEAST_BYTES_OF_DOCUMENT = 20, 100  # on average
HASHES_OF_BUCKET, MOST_BUCKETS = 1 << 22, 1 << 14
_BYTES = 12  # of a hash and its position
COPIES, OFFSETS = "copies.u64", "offsets.npy"
IsCounted = Callable[[int, np.ndarray], np.ndarray]


def num_buckets(num_bytes: int, bands: int = 0) -> int:
    """Return a power of two, of buckets that fit into memory for that many bytes of text.

    bands: hashes of each document by which near copies are found.
    """
    hashes = max(num_bytes // LEAST_BYTES_OF_LINE, bands * num_bytes // LEAST_BYTES_OF_DOCUMENT)
    return min(1 << (hashes // HASHES_OF_BUCKET).bit_length(), MOST_BUCKETS)


class HashWriter:
    """A writer of NAME.hashes and NAME.npy in `folder`. Positions are the numbers of the hashes."""

    def __init__(self, folder: Path, name: str, buckets: int):
        self._path, self._buckets = folder / name, buckets
        self._file = open(_hashes_path(self._path), "wb")  # noqa: SIM115 (closed by __exit__)
        self._waiting, self._ends = array("Q"), list[np.ndarray]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._write(self._waiting)
            np.save(self._path.with_suffix(".npy"), np.array(self._ends, np.uint32))
        self._file.close()

    def add(self, hashes: Iterable[int] | np.ndarray) -> None:
        if isinstance(hashes, np.ndarray):
            self._waiting.frombytes(hashes.tobytes())
        else:
            self._waiting.extend(hashes)
        while len(self._waiting) >= RUN:
            self._write(self._waiting[:RUN])
            del self._waiting[:RUN]

    def _write(self, hashes: "array[int]") -> None:
        run = np.frombuffer(hashes, np.uint64) if hashes else np.empty(0, np.uint64)
        bucket = bucket_of(run, self._buckets)
        order = np.argsort(bucket, kind="stable")
        self._file.write(run[order].tobytes())
        self._file.write(order.astype(np.uint32).tobytes())
        self._ends.append(np.concatenate([[0], np.cumsum(np.bincount(bucket, minlength=self._buckets))]))


def bucket_of(hashes: np.ndarray, buckets: int) -> np.ndarray:
    bits = buckets.bit_length() - 1
    return (hashes >> np.uint64(64 - bits)).astype(np.int64) if bits else np.zeros(len(hashes), np.int64)


def _hashes_path(path: Path) -> Path:
    return path.with_suffix(".hashes")


def read_bucket(folder: Path, name: str, bucket: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of a bucket and their positions (uint64), in the order in which they were added."""
    path = folder / name
    ends = np.load(path.with_suffix(".npy"), mmap_mode="r")  # two numbers of a run are read
    hashes, positions, begin = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)], 0
    for run, of_run in enumerate(ends):
        size, before, after = (int(of_run[place]) for place in (-1, bucket, bucket + 1))
        if number := after - before:
            file = _hashes_path(path)
            hashes.append(np.fromfile(file, np.uint64, number, offset=begin + 8 * before))
            place = begin + 8 * size + 4 * before
            positions.append(np.fromfile(file, np.uint32, number, offset=place).astype(np.uint64) + run * RUN)
        begin += _BYTES * size
    return np.concatenate(hashes), np.concatenate(positions)


def write_copies(
    parts: Sequence[Path], name: str, bucket: int, folder: Path, is_counted: IsCounted | None = None
) -> None:
    """Write the positions in each part whose hash an earlier part or an earlier position has.

    is_counted: part, positions → which of them count. The others are no copies and have none.
    """
    found, places, sizes = list[np.ndarray](), list[np.ndarray](), list[int]()
    for number, part in enumerate(parts):
        hashes, positions = read_bucket(part, name, bucket)
        if is_counted is not None and len(positions):
            counted = is_counted(number, positions)
            hashes, positions = hashes[counted], positions[counted]
        found.append(hashes)
        places.append(positions)
        sizes.append(len(hashes))
    flags = _is_copy(np.concatenate(found))
    ends = np.cumsum(sizes)
    with open(folder / COPIES, "wb") as file:
        offsets = [0]
        for positions, of_part in zip(places, np.split(flags, ends[:-1]), strict=True):
            file.write(positions[of_part].tobytes())
            offsets.append(offsets[-1] + int(of_part.sum()))
    np.save(folder / OFFSETS, np.array(offsets, np.int64))


def _is_copy(hashes: np.ndarray) -> np.ndarray:
    """Return True for each hash that an earlier element equals."""
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    flags = np.zeros(len(hashes), bool)
    flags[order[1:][hashes[1:] == hashes[:-1]]] = True
    return flags


def read_copies(buckets: Iterable[Path], part: int) -> Iterator[np.ndarray]:
    """Yield the positions of copies in a part, from the folders that `write_copies` wrote."""
    for folder in buckets:
        begin, end = (int(offset) for offset in np.load(folder / OFFSETS, mmap_mode="r")[part : part + 2])
        if end > begin:
            yield np.fromfile(folder / COPIES, np.uint64, end - begin, offset=8 * begin)
