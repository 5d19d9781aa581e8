"""Blocks of rows of an export: their borders, their numbers, and a weight that no dtype of it holds."""

from pathlib import Path

import pytest
import torch

from kielo.artifact.checkpoint_index import read_index
from kielo.checkpoint import export_tensors
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.export_tensors import (
    CheckpointRows,
    FileTensor,
    NotFiniteError,
    row_blocks,
    row_boxes,
)
from kielo.models.piece import Piece


@pytest.mark.parametrize(
    ("shape", "bounds"),
    [
        ((), [()]), ((0, 3), []),
        ((7, 3), [((0, 4), (0, 3)), ((4, 7), (0, 3))]), ((4, 3), [((0, 4), (0, 3))]),
        ((2, 13), [((0, 1), (0, 13)), ((1, 2), (0, 13))]), ((3, 0), [((0, 3), (0, 0))]),
        ((13,), [((0, 12),), ((12, 13),)]), ((3, 2, 3), [((0, 2), (0, 2), (0, 3)), ((2, 3), (0, 2), (0, 3))]),
    ],
)  # fmt: skip
def test_rows_of_48_bytes_of_fp32(shape, bounds, monkeypatch) -> None:
    """Twelve numbers at a time, or one row that is longer; a scalar has one row."""
    assert export_tensors.BLOCK_BYTES == 64 * 1024 * 1024
    monkeypatch.setattr(export_tensors, "BLOCK_BYTES", 48)
    assert list(row_boxes(shape)) == [tuple(slice(*pair) for pair in one) for one in bounds]
    rows = [one[0] if one else (0, 1) for one in bounds]
    assert list(row_blocks(FileTensor("t", torch.float64, shape, {}))) == [slice(*pair) for pair in rows]


def rows_of(folder: Path, **tensors: torch.Tensor) -> CheckpointRows:
    checkpointer = Checkpointer(folder)
    checkpointer.save(3, {f"model/{name}": value for name, value in tensors.items()}, {})
    path = checkpointer.settle()
    return CheckpointRows(path, read_index(path))


def test_rows_of_fused_and_transposed_parameters(tmp_path) -> None:
    """Two parameters of two heads of two rows, head by head; one turned; one with padding, and a scalar."""
    first, second = torch.arange(12.0).view(4, 3), 100 + torch.arange(12.0).view(4, 3)
    rows = rows_of(tmp_path, first=first, second=second, scale=torch.tensor(7.0))
    fused = FileTensor("fused", torch.float64, (8, 3), {
        "first": Piece("fused", 0, 2, 4), "second": Piece("fused", 2, 2, 4),
    })  # fmt: skip
    whole = torch.cat([first[:2], second[:2], first[2:], second[2:]]).double()
    assert fused.bytes == 8 * 3 * 8
    for start in range(8):
        for stop in range(start + 1, 9):
            found = rows.read(fused, slice(start, stop))
            assert found.dtype == torch.float64 and found.equal(whole[start:stop]), (start, stop)
    turned = FileTensor("turned", torch.bfloat16, (3, 4), {"first": Piece("turned", transposed=True)})
    assert rows.read(turned, slice(1, 3)).equal(first.T[1:3].bfloat16())
    cut = FileTensor("cut", torch.float32, (3, 3), {"second": Piece("cut", rows=3)})
    assert rows.read(cut, slice(0, 3)).equal(second[:3])
    scale = FileTensor("scale", torch.float16, (), {"scale": Piece("scale")})
    assert rows.read(scale, slice(0, 1)).item() == 7 and scale.bytes == 2
    with pytest.raises(ValueError, match=r"^long: its pieces fill 12 of 15 elements in slice\(0, 5, None\)$"):
        rows.read(FileTensor("long", torch.float32, (5, 3), {"first": Piece("long")}), slice(0, 5))


def test_why_a_weight_cannot_be_exported(tmp_path, monkeypatch) -> None:
    """Counted over the whole tensor, of which a block holds one row."""
    monkeypatch.setattr(export_tensors, "BLOCK_BYTES", 12)
    broken, large = torch.arange(12.0).double().view(4, 3), torch.arange(12.0).view(4, 3)
    broken[1, 1] = broken[3, 2] = 1e300
    large[0, 2], large[2, 0] = 70_000, -80_000.4
    rows = rows_of(tmp_path, broken=broken, large=large)
    folder = tmp_path / "step_00000003"

    def told(ours: str, dtype: torch.dtype) -> str:
        tensor = FileTensor("w", dtype, (4, 3), {ours: Piece("w")})
        with pytest.raises(NotFiniteError) as caught:
            for block in row_blocks(tensor):
                rows.read(tensor, block)
        return str(caught.value)

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert told("broken", dtype) == (
            f"{folder}: w has 2 of 12 numbers that are NaN or infinite. Fix: an earlier "
            "checkpoint (`kielo checkpoint list RUN`)"
        )
    assert told("large", torch.float16) == (
        "w has a weight of magnitude 80,000, and fp16 ends at 65,504. Fix: --dtype fp32 or bf16"
    )
