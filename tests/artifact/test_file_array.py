"""A row of numbers in a file: its numbers, and an error, not a signal, where the file does not give them."""

import os
import threading

import numpy as np
import pytest

from kielo.artifact.token_file import FileArray, file_being_read


def test_parts_are_those_of_the_file(tmp_path):
    """Any slice without gaps, any rows, beyond 4 bytes that are not numbers."""
    numbers = np.arange(100, dtype="<u2")
    path = tmp_path / "numbers.bin"
    path.write_bytes(b"head" + numbers.tobytes())
    array = FileArray(path, "<u2", 100, first_byte=4)
    for part in (slice(None), slice(3, 9), slice(90, 200), slice(9, 3), slice(-5, None)):
        assert np.array_equal(array[part], numbers[part])
    assert np.array_equal(array.rows(np.array([7, 0]), 3), [[7, 8, 9], [0, 1, 2]])
    assert array[np.array([5, 99, 0])].tolist() == [5, 99, 0]
    assert array.rows(np.zeros(0, np.int64), 3).shape == (0, 3)
    assert np.array_equal(np.asarray(array), numbers) and len(array) == 100
    assert len(FileArray(path, "<u2", 0)[:]) == 0


def test_a_file_that_is_cut_while_it_is_open_raises(tmp_path):
    """A mapped file would end the process. What is there is still read, and so is a whole file again."""
    path = tmp_path / "numbers.bin"
    path.write_bytes(np.arange(100, dtype="<i4").tobytes())
    array = FileArray(path, "<i4", 100)
    assert array[99:].tolist() == [99]
    os.truncate(path, 200)
    with pytest.raises(OSError, match="ends at byte 200: it was cut.*numbers.bin"):
        array[48:52]
    assert array[:2].tolist() == [0, 1]
    path.unlink()
    with pytest.raises(OSError, match="ends at byte 240: it was cut"):  # the open file
        array[60:61]
    with pytest.raises(FileNotFoundError, match="No such file or directory: .*numbers.bin"):
        array[60:61]
    path.write_bytes(np.arange(100, dtype="<i4").tobytes())
    assert array[60:61].tolist() == [60] and file_being_read(None) is None


def test_the_file_that_a_thread_waits_for_is_known(tmp_path, monkeypatch):
    """While it reads, also where that fails; of another thread nothing."""
    path, seen, original = tmp_path / "numbers.bin", [], os.preadv
    path.write_bytes(np.arange(10, dtype="<i4").tobytes())

    def preadv(*arguments):
        seen.append((file_being_read(threading.get_ident()), file_being_read(-1), file_being_read(None)))
        return original(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    array = FileArray(path, "<i4", 11)
    assert array[2:4].tolist() == [2, 3]
    with pytest.raises(OSError, match="ends at byte 40: it was cut"):
        array[9:11]
    assert seen == [(path, None, None)] * 3 and file_being_read(threading.get_ident()) is None
