"""Rows of a transplant by blocks of any size: the old rows that are read, and the values they give."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kielo.artifact.stage_counts import RowMap
from kielo.checkpoint import transplant as module
from kielo.checkpoint.split_tensor import SplitTensor
from kielo.checkpoint.tensor_file import ReadBuffers
from kielo.checkpoint.tensor_table import read_table
from kielo.checkpoint.transplant import Source, Transplant
from kielo.models.piece import Box

# Old row n is n, 10 n, 100 n; new rows 2 to 8 are looked at.
ROWS = [[0], [1], [5], [], [], [], [1, 1, 4], [2, 3], [4, 5], [0]]
WEIGHTS = {"8": [0.25, 0.5], "0": [7.0]}
BY_HAND = [[5, 50, 500], [-3, -3, -3], [-4, -4, -4], [-5, -5, -5], [2, 20, 200], [2.5, 25, 250],
           [3.5, 35, 350]]  # fmt: skip


class Seen(Source):
    """Notes the old rows of each block that is read."""

    def read(self, rows: np.ndarray, others: Box, device: torch.device) -> torch.Tensor:
        self.buffers.blocks.append(rows.tolist())
        return super().read(rows, others, device)


class Buffers(ReadBuffers):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[list[int]] = []


@pytest.fixture
def source(tmp_path) -> Seen:
    return written(tmp_path, torch.arange(7.0).outer(torch.tensor([1.0, 10.0, 100.0])))


def written(tmp_path: Path, old: torch.Tensor) -> Seen:
    save_file({"x": torch.zeros(3), "e": old}, tmp_path / "m.safetensors")
    path = tmp_path / "m.safetensors"
    return Seen(SplitTensor.of_file(path, read_table(path)["e"]), Buffers())


def row_map(weights: dict[str, list[float]] | None = None) -> RowMap:
    return RowMap(method="focus", old_tokenizer="", old_vocabulary_size=7, rows=ROWS, control_tokens={},
                  weights=weights or WEIGHTS)  # fmt: skip


def minus_row(name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """First values: minus the number of the row."""
    rows = -torch.arange(float(box[0].start), box[0].stop)
    return rows.view(-1, *[1] * (len(box) - 1)).expand(-1, *[part.stop - part.start for part in box[1:]])


@pytest.mark.parametrize(
    ("block_bytes", "blocks"),
    [
        (1, [[1], [2], [3], [4], [5]]), (23, [[1], [2], [3], [4], [5]]), (24, [[1, 2], [3, 4], [5]]),
        (36, [[1, 2, 3], [4, 5]]), (1 << 20, [[1, 2, 3, 4, 5]]),
    ],
)  # fmt: skip
def test_rows_by_blocks(block_bytes, blocks, source, monkeypatch) -> None:
    """Each old row that is wanted is read once, in the order of the file; padding becomes zero."""
    assert module.BLOCK_BYTES == 32 * 1024 * 1024
    monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    shard = torch.full((7, 3), torch.nan)
    made = Transplant(row_map(), minus_row)
    assert made.fill("embed.weight", (10, 3), shard, (slice(2, 9), slice(0, 3)), source)
    assert shard.tolist() == BY_HAND and source.buffers.blocks == blocks


def test_part_of_the_columns_and_rows_beyond_the_vocabulary(source) -> None:
    shard = torch.full((4, 2), torch.nan)
    made = Transplant(row_map(), minus_row)
    assert made.fill("embed.weight", (12, 3), shard, (slice(7, 11), slice(1, 3)), source)
    assert shard.tolist() == [[25, 250], [35, 350], [0, 0], [0, 0]]
    assert made.fill("embed.weight", (12, 3), shard, (slice(10, 14), slice(1, 3)), source)
    assert shard.tolist() == [[0, 0]] * 4
    before = list(source.buffers.blocks)
    assert made.fill("embed.weight", (12, 3), shard[:0], (slice(3, 3), slice(1, 3)), source)
    assert source.buffers.blocks == before


def test_a_row_of_single_numbers(tmp_path, monkeypatch) -> None:
    """A bias of the head: blocks of two numbers."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 8)
    source, shard = written(tmp_path, torch.arange(7.0)), torch.full((7,), torch.nan)
    made = Transplant(row_map(), minus_row)
    assert made.fill("head.bias", (10,), shard, (slice(2, 9),), source)
    assert shard.tolist() == [row[0] for row in BY_HAND] and source.buffers.blocks == [[1, 2], [3, 4], [5]]


def test_first_values_are_asked_for_by_runs(source, monkeypatch) -> None:
    """Of rows beside each other, two at a time here; in the parameter's own numbers."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 24)
    asked = []

    def first_value(name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
        asked.append((name, shape, box))
        return minus_row(name, shape, box)

    shard = torch.zeros(9, 3)
    Transplant(row_map(), first_value).fill(
        "head.weight", (10, 3), shard, (slice(1, 10), slice(0, 3)), source
    )
    columns = slice(0, 3)
    assert asked == [
        ("head.weight", (10, 3), (slice(3, 5), columns)), ("head.weight", (10, 3), (slice(5, 6), columns)),
    ]  # fmt: skip
    assert shard.tolist() == [[1, 10, 100], *BY_HAND, [0, 0, 0]]
