"""A row of numbers in a file, of which slices are read when they are asked for.

A mapped file is faster for single numbers, but it ends the process (SIGBUS) where the file was cut or its
disk fails. Reading raises OSError, which names the file.
"""

import errno
import os
import threading
from io import FileIO
from pathlib import Path

import numpy as np

_BEING_READ: dict[int, Path] = {}  # thread → the file that it waits for


class FileArray:
    """The first `length` numbers of `dtype` in a file, from `first_byte` on. It is opened when first read.

    After an error it is opened again, so that what goes away with the file system's next answer does no harm.
    """

    def __init__(self, path: Path, dtype: np.dtype | str, length: int, first_byte: int = 0):
        self._path, self._length, self._first_byte = path, length, first_byte
        self.dtype = np.dtype(dtype)
        self._file: FileIO | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice | np.ndarray) -> np.ndarray:
        """Returns a part without gaps, or the numbers at places [n]. Raises OSError where the file fails."""
        if not isinstance(part, slice):
            return self.rows(part, 1)[:, 0]
        start, stop, _ = part.indices(self._length)
        return self.rows(np.array([start]), max(0, stop - start))[0]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self[:] if dtype is None else self[:].astype(dtype)

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Returns parts of one length that begin at `starts` [n], as [n, length]. Raises OSError."""
        found = np.empty((len(starts), length), self.dtype)
        if not found.size:
            return found
        thread = threading.get_ident()
        _BEING_READ[thread] = self._path
        try:
            for row, start in zip(found, starts.tolist()):
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
    """Returns the file that a thread waits for now, by its identifier; None where it waits for none."""
    return None if thread is None else _BEING_READ.get(thread)
