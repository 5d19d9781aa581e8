"""Boxes of tensors in files: the numbers that are read, and the calls that bring their bytes."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from kielo.checkpoint.tensor_file import BUFFER_BYTES, READ_THROUGH_BYTES, ReadBuffers, TensorFile, Wanted
from kielo.checkpoint.tensor_table import StoredTensor
from kielo.recipe.errors import KieloError

Calls = list[tuple[int, list[int]]]


@pytest.fixture
def calls(monkeypatch) -> Calls:
    """First byte and sizes of the parts of each call that reads."""
    found: Calls = []
    original = os.preadv

    def preadv(descriptor: int, parts: list[memoryview], offset: int) -> int:
        found.append((offset, [len(part) for part in parts]))
        return original(descriptor, parts, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return found


def numbers(path: Path, count: int, dtype: str = "<f4", head: int = 20) -> np.ndarray:
    """Writes 0, 1, 2 … after `head` bytes."""
    values = np.arange(count).astype(dtype)
    path.write_bytes(b"x" * head + values.tobytes())
    return values


def box(*bounds: tuple[int, int]) -> tuple[slice, ...]:
    return tuple(slice(*pair) for pair in bounds)


def read(path: Path, stored: StoredTensor, part: tuple[slice, ...], buffer_bytes: int = 4096) -> torch.Tensor:
    target = torch.full([one.stop - one.start for one in part], -1.0, dtype=torch.float64)
    with TensorFile(path, {"t": stored}, ReadBuffers(buffer_bytes)) as file:
        file.read([Wanted(file.tensors["t"], part, target)])
    return target


@pytest.mark.parametrize("buffer_bytes", [8, 24, 64, 80, 4096])
@pytest.mark.parametrize(
    ("shape", "strides", "part"),
    [
        ((), (), ()),
        ((7,), (1,), box((2, 6))),
        ((7,), (3,), box((1, 6))),
        ((5, 6), (6, 1), box((1, 4), (0, 6))),
        ((5, 6), (6, 1), box((1, 5), (2, 5))),
        ((5, 6), (1, 5), box((1, 4), (2, 6))),
        ((5, 3), (12, 2), box((1, 5), (1, 3))),
        ((3, 4, 5), (20, 5, 1), box((0, 3), (1, 3), (1, 4))),
        ((3, 4, 5), (1, 15, 3), box((1, 3), (1, 4), (2, 5))),
        ((2, 3, 2, 4), (24, 8, 4, 1), box((0, 2), (1, 3), (1, 2), (1, 4))),
    ],
)
def test_a_box_of_any_view_by_any_buffer(shape, strides, part, buffer_bytes, tmp_path) -> None:
    """Beside numpy's own view of the same bytes."""
    path = tmp_path / "f"
    values = numbers(path, 100)
    view = np.lib.stride_tricks.as_strided(values[3:], shape, [4 * stride for stride in strides])
    found = read(path, StoredTensor("F32", shape, 20 + 3 * 4, strides), part, buffer_bytes)
    assert found.tolist() == view[part].tolist()


def test_rows_are_divided_by_the_buffer(calls, tmp_path) -> None:
    """Read as many whole rows as fit, or as many columns of longer rows."""
    path, stored = tmp_path / "f", StoredTensor("F32", (5, 10), 20, (10, 1))
    numbers(path, 50)
    for buffer_bytes, sizes in (
        (80, [80, 80, 40]), (119, [80, 80, 40]), (120, [120, 80]), (200, [200]), (24, [24, 16] * 5),
        (40, [40] * 5),
    ):  # fmt: skip
        calls.clear()
        read(path, stored, box((0, 5), (0, 10)), buffer_bytes)
        assert [parts for _, parts in calls] == [[size] for size in sizes], buffer_bytes
        assert [at for at, _ in calls] == [20 + sum(sizes[:number]) for number in range(len(sizes))]


def test_tensors_share_a_buffer_at_multiples_of_64_bytes(calls, tmp_path) -> None:
    """Read two pieces of 40 bytes within 104 and 128, and two of 64 within 128, in the file's order."""
    path = tmp_path / "f"
    numbers(path, 100)
    for items, buffer_bytes, sizes in (
        (10, 128, [2, 1]), (10, 104, [2, 1]), (10, 103, [1, 1, 1]), (16, 128, [2, 1]), (17, 191, [1, 1, 1]),
        (17, 196, [2, 1]), (10, 168, [3]),
    ):  # fmt: skip
        calls.clear()
        targets = [torch.zeros(items) for _ in range(3)]
        with TensorFile(path, {}, ReadBuffers(buffer_bytes)) as file:
            file.read(
                Wanted(StoredTensor("F32", (items,), 20 + 4 * items * at, (1,)), box((0, items)), targets[at])
                for at in (2, 0, 1)
            )
        assert torch.cat(targets).tolist() == list(range(3 * items))
        assert [parts for _, parts in calls] == [[4 * items] * size for size in sizes], (items, buffer_bytes)


def test_small_gaps_are_read_along_and_large_ones_are_not(calls, tmp_path) -> None:
    """Up to 8,192 bytes between two rows."""
    assert READ_THROUGH_BYTES == 8192 and BUFFER_BYTES == 33_554_432
    path = tmp_path / "f"
    for columns, expected in (
        (8194, [(20, [2, 8192, 2, 8192, 2])]),
        (8195, [(20, [2]), (20 + 8195, [2]), (20 + 2 * 8195, [2])]),
    ):
        values = numbers(path, 3 * columns, "u1").reshape(3, columns)
        calls.clear()
        found = read(path, StoredTensor("U8", (3, columns), 20, (columns, 1)), box((0, 3), (0, 2)))
        assert calls == expected and found.tolist() == values[:, :2].tolist()


def test_a_call_has_at_most_1024_parts(calls, tmp_path) -> None:
    path = tmp_path / "f"
    values = numbers(path, 3000, "u1")
    matrix = values.reshape(600, 5)
    found = read(path, StoredTensor("U8", (600, 5), 20, (5, 1)), box((0, 600), (1, 3)))
    assert found.tolist() == matrix[:, 1:3].tolist()
    assert [(at, len(parts)) for at, parts in calls] == [(21, 1023), (21 + 512 * 5, 2 * 88 - 1)]
    calls.clear()
    targets = torch.zeros(1100)
    with TensorFile(path, {}, ReadBuffers(1100 * 64)) as file:
        file.read(
            Wanted(StoredTensor("U8", (1,), 20 + at, (1,)), box((0, 1)), targets[at : at + 1])
            for at in range(1100)
        )
    assert targets.tolist() == values[:1100].tolist()
    assert [len(parts) for _, parts in calls] == [1023, 77]


def test_the_kernel_is_asked_for_what_lies_between_rows(monkeypatch, tmp_path) -> None:
    """Skip gaps of 8,193 to 131,072 bytes; read the file from its beginning to its end."""
    path, asked = tmp_path / "f", []
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, *what: asked.append(what))
    path.touch()
    os.truncate(path, 500_000)
    every = 131_072
    for columns, expected in (
        (8194, []),
        (8195, [20]),
        (every + 2, [20 + number * every for number in range(4)]),
        (every + 3, []),
    ):
        asked.clear()
        read(path, StoredTensor("U8", (3, columns), 20, (columns, 1)), box((0, 3), (0, 2)))
        first, *others = asked
        assert first == (0, 0, os.POSIX_FADV_SEQUENTIAL)
        assert others == [(at, every, os.POSIX_FADV_WILLNEED) for at in expected], columns


@pytest.mark.parametrize("limit", [1, 7, 8, 9, 12, 16, 20, 28, 30])
def test_a_call_that_brings_less_is_gone_on_with(limit, monkeypatch, tmp_path) -> None:
    """At any byte, also exactly at the end of a row or of a gap."""
    path = tmp_path / "f"
    values = numbers(path, 40).reshape(8, 5)

    def stingy(descriptor: int, parts: list[memoryview], offset: int) -> int:
        data, got = os.pread(descriptor, limit, offset), 0
        for part in parts:
            size = min(len(part), len(data) - got)
            part[:size] = data[got : got + size]
            got += size
        return got

    monkeypatch.setattr(os, "preadv", stingy)
    found = read(path, StoredTensor("F32", (8, 5), 20, (5, 1)), box((1, 7), (1, 3)))
    assert found.tolist() == values[1:7, 1:3].tolist()


def test_what_cannot_be_read_is_named(monkeypatch, tmp_path, calls) -> None:
    """Nothing is read for a box without numbers."""
    path, stored = tmp_path / "f", StoredTensor("F32", (4,), 20, (1,))
    with pytest.raises(KieloError, match=r"f: cannot be read \(No such file or directory\)$"):
        TensorFile(path, {})
    numbers(path, 3)
    assert read(path, stored, box((2, 2))).tolist() == [] and calls == []
    with pytest.raises(KieloError, match="f: cut short or damaged: it ends before byte 32$"):
        read(path, stored, box((0, 4)))

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(KieloError, match=r"f: cannot be read at byte 24 \(Input/output error\)$"):
        read(path, stored, box((1, 2)))


def test_two_buffers_are_kept() -> None:
    buffers = ReadBuffers(96)
    first, second = buffers.buffer(0, False), buffers.buffer(1, False)
    assert (first.numel(), first.dtype, second.numel()) == (96, torch.uint8, 96)
    assert buffers.buffer(0, False) is first and buffers.buffer(1, False) is second and first is not second
    assert ReadBuffers().buffer_bytes == 32 * 1024 * 1024
