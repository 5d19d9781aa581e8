"""A file of tokens from another program, and the rows of numbers in it, read lazily."""

import errno
import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from kielo.artifact.stage_json import JsonObject

_BEING_READ: dict[int, Path] = {}  # thread → the file that it waits for


class FileArray:
    """The first `length` numbers of `dtype` in a file, from `first_byte` on, read when asked for.

    A mapped file would end the process (SIGBUS) if it was cut or its disk fails. Reading raises OSError with
    the file. The next read opens it again, so a short outage of a file system is survived.
    """

    def __init__(self, path: Path, dtype: DTypeLike, length: int, first_byte: int = 0):
        self._path, self._length, self._first_byte = path, length, first_byte
        self.dtype = np.dtype(dtype)
        self._file: FileIO | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice | np.ndarray) -> np.ndarray:
        """Return a part without gaps, or the numbers at places [n]. Raises OSError."""
        if not isinstance(part, slice):
            return self.rows(part, 1)[:, 0]
        start, stop, _ = part.indices(self._length)
        return self.rows(np.array([start]), max(0, stop - start))[0]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self[:] if dtype is None else self[:].astype(dtype)

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return parts of one length that begin at `starts` [n], as [n, length]. Raises OSError."""
        found = np.empty((len(starts), length), self.dtype)
        if not found.size:
            return found
        thread = threading.get_ident()
        _BEING_READ[thread] = self._path
        try:
            for row, start in zip(found, starts.tolist(), strict=True):
                self._fill(memoryview(row).cast("B"), self._first_byte + start * self.dtype.itemsize)
        except OSError:
            self._file = None
            raise
        finally:
            del _BEING_READ[thread]
        return found

    def _fill(self, row: memoryview, place: int) -> None:
        if self._file is None:
            self._file = FileIO(self._path)
        while row:
            count = os.preadv(self._file.fileno(), [row], place)
            if not count:
                raise OSError(errno.ENODATA, f"ends at byte {place:,}: it was cut", str(self._path))
            row, place = row[count:], place + count


def file_being_read(thread: int | None) -> Path | None:
    """Return the file that a thread (its identifier) waits for now, or None."""
    return None if thread is None else _BEING_READ.get(thread)


class TokenFile(JsonObject):
    """The description of a file of tokens and its index, with which it is opened without a look at it."""

    name: str
    """The data's path, relative to the folder of its set."""
    format: str
    """megatron, npy or ds."""
    dtype: str
    """Type of the stored ids, as numpy names it."""
    first_byte: int
    """Offset of the first id, in bytes."""
    tokens: int
    documents: int | None
    """null if no index says it."""
    bytes: int
    """Size of the data."""
    index_bytes: int
    """Size of the index, 0 without one."""
    fingerprint: str
    """xxh3-128 of the sizes and both ends of data, index and mask."""
    loss_mask: str | None = None
    """Name of the file beside it with a byte for each token, 0 if predicting it carries no loss."""


class DocumentIndex(ABC):
    """The documents of a file, by their first tokens. The index is not held in memory."""

    num_documents: int

    @abstractmethod
    def starts(self, first: int, last: int) -> np.ndarray:
        """Return the first tokens of documents first .. last-1, int64 [last - first]."""

    def number_at(self, token: int) -> int:
        documents = range(self.num_documents)
        return bisect_left(documents, token, key=lambda number: int(self.starts(number, number + 1)[0]))


class MegatronIndex(DocumentIndex):
    """The arrays of a `.idx`. pointers: first byte of each sequence; documents: first sequence of each."""

    def __init__(self, pointers: np.ndarray, documents: np.ndarray, num_tokens: int, token_bytes: int):
        self._pointers, self._documents = pointers, documents
        self._num_tokens, self._token_bytes = num_tokens, token_bytes
        self.num_documents = len(documents) - 1

    def starts(self, first: int, last: int) -> np.ndarray:
        sequences = np.asarray(self._documents[first:last], np.int64)
        # Empty documents at the end begin at no sequence. A damaged index can have negative numbers.
        is_inside = (sequences >= 0) & (sequences < len(self._pointers))
        starts = np.where(sequences < 0, np.int64(-1), np.int64(self._num_tokens))
        starts[is_inside] = self._pointers[sequences[is_inside]] // self._token_bytes
        return starts


class EndsIndex(DocumentIndex):
    def __init__(self, ends: np.ndarray):
        self._ends, self.num_documents = ends, len(ends)

    def starts(self, first: int, last: int) -> np.ndarray:
        if first == 0:
            return np.concatenate([np.zeros(1, np.int64), self._ends[: last - 1].astype(np.int64)])[:last]
        return self._ends[first - 1 : last - 1].astype(np.int64)


class OpenTokenFile:
    """An opened file with its ids, [tokens]. `index` is None if documents only end with end-of-text."""

    def __init__(self, path: Path, file: TokenFile, index: DocumentIndex | None, end_of_text_id: int):
        self._file, self._end, self.index = file, end_of_text_id, index
        self.tokens = FileArray(path, file.dtype, file.tokens, file.first_byte)
        mask = path.with_name(file.loss_mask) if file.loss_mask else None
        self.loss_mask = FileArray(mask, np.uint8, file.tokens) if mask else None

    def document_starts(self, start: int, end: int) -> np.ndarray:
        """Return the tokens in start .. end-1 at which documents begin, int64; empty documents repeat one."""
        if self.index is not None:
            return self.index.starts(self.index.number_at(start), self.index.number_at(end))
        before = max(start - 1, 0)
        found = np.flatnonzero(self.tokens[before : max(end - 1, before)] == self._end) + before + 1
        return np.concatenate([np.zeros(1, np.int64), found]) if start == 0 < end else found

    def document_name(self, token: int) -> str:
        """Return "document N" of the token; in a file without an index "token N", its beginning."""
        if self.index is not None:
            return f"document {self.index.number_at(token + 1) - 1}"
        end, step = token, 1 << 16
        while end > 0:
            start = max(0, end - step)
            ends = np.flatnonzero(self.tokens[start:end] == self._end)
            if len(ends):
                return f"token {start + int(ends[-1]) + 1}"
            end = start
        return "token 0"
