"""Rows of a new vocabulary are counted by what they are made of."""

import pytest

from kielo.artifact.stage_counts import RowMap


def row_map(rows: list[list[int]], **weights: list[float]) -> RowMap:
    return RowMap(
        method="focus", old_tokenizer="", old_vocabulary_size=9, rows=rows, control_tokens={},
        weights={key.removeprefix("of_"): value for key, value in weights.items()},
    )  # fmt: skip


def test_rows_by_what_they_are_made_of() -> None:
    """Two that are copies, three composed (of one weighted row too), four random."""
    found = row_map([[], [4], [1, 2, 3], [], [5], [7], [], [1, 1], []], of_5=[0.5])
    composed = [2, 5, 7]
    assert [number for number in range(9) if found.is_composed(number)] == composed
    assert (found.copied, found.composed, found.random) == (2, 3, 4)
    assert found.tokens_per_composed_row == pytest.approx((3 + 1 + 2) / 3)
    assert row_map([[1], []]).tokens_per_composed_row == 0
