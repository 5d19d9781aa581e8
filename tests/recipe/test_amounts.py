"""Numbers as people write them."""

import pytest

from kielo.recipe.amounts import parse_amount, short_amount


@pytest.mark.parametrize(
    ("text", "number"),
    [("3B", 3 * 10**9), ("350M", 350 * 10**6), ("1.5T", 1_500_000_000_000), ("1.24 b", 1_240_000_000),
     ("60_000", 60_000), ("1,000K", 10**6), (7, 7)],
)  # fmt: skip
def test_an_amount_is_exact(text, number) -> None:
    assert parse_amount(text) == number


@pytest.mark.parametrize("text", ["", "B", "3 billion", "-3B", "3Bx", "1e9", "9" * 30])
def test_what_is_no_amount_is_refused(text) -> None:
    with pytest.raises(ValueError, match="what would work"):
        parse_amount(text)


@pytest.mark.parametrize("number", [3 * 10**9, 350 * 10**6, 1_240_000_000, 17, 2 * 10**12])
def test_a_short_amount_is_read_back(number) -> None:
    assert parse_amount(short_amount(number)) == number
