"""Numbers as people write them."""

import pytest

from kielo.recipe.amounts import format_seconds, parse_amount, parse_device_hours, short_amount
from kielo.recipe.read import read_recipe


@pytest.mark.parametrize(
    ("text", "number"),
    [("3B", 3 * 10**9), ("350M", 350 * 10**6), ("1.5T", 1_500_000_000_000), ("1.24 b", 1_240_000_000),
     ("60_000", 60_000), ("1,000K", 10**6), (7, 7), ("1e9", 10**9), ("1.5E3", 1500), ("2k", 2000)],
)  # fmt: skip
def test_an_amount_is_exact(text, number) -> None:
    assert parse_amount(text) == number


@pytest.mark.parametrize(
    "text", ["", "B", "3 billion", "-3B", "3Bx", "1,5B", "1.5", "1.2345K", "1e-3", "9" * 30]
)
def test_what_is_no_amount_is_refused(text) -> None:
    with pytest.raises(ValueError, match="Fix: "):
        parse_amount(text)


@pytest.mark.parametrize(
    ("entry", "key", "value"),
    [("train.tokens_per_step=4096K", ("train", "tokens_per_step"), 4_096_000),
     ("train.tokens=4T", ("train", "tokens"), 4 * 10**12), ("nodes=64", ("nodes",), (64,)),
     ("nodes=16,32", ("nodes",), (16, 32)),
     ("corpus.max_document_bytes=2M", ("corpus", "max_document_bytes"), 2 * 10**6),
     ("tokenizer.vocab_size=32K", ("tokenizer", "vocab_size"), 32_000)],
)  # fmt: skip
def test_keys_of_recipes_take_amounts(entry, key, value) -> None:
    """Of every key that counts something; one number stands for a list of one."""
    found = read_recipe("norwegian_7b", [entry]).recipe
    for name in key:
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize("number", [3 * 10**9, 350 * 10**6, 1_240_000_000, 17, 2 * 10**12])
def test_a_short_amount_is_read_back(number) -> None:
    assert parse_amount(short_amount(number)) == number


def test_an_amount_has_18_digits_before_the_point_at_most() -> None:
    assert parse_amount("9" * 18) == 10**18 - 1
    with pytest.raises(ValueError, match=r"a number below 2\*\*63, such as 3B"):
        parse_amount("1" + "0" * 18)


@pytest.mark.parametrize(
    ("text", "hours"),
    [("20000h", 20_000), ("1.5M GPU-hours", 1_500_000), (" 7 device hour ", 7), ("3k h", 3_000),
     ("2_000gpuhours", 2_000), ("60B", None), ("h", None), ("20000 hours", None)],
)  # fmt: skip
def test_device_hours(text, hours) -> None:
    assert parse_device_hours(text) == hours


def test_a_short_amount_keeps_two_digits_after_the_point() -> None:
    written = {
        0: "0", 999: "999", 1000: "1K", 1234: "1.23K", 999_999: "1000K", 10**6: "1M", 1_236_000: "1.24M",
        10**9: "1B", 2_500_000_000: "2.5B", 10**12: "1T", 10**13: "10T",
    }  # fmt: skip
    assert {number: short_amount(number) for number in written} == written


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"), (9.94, "9.9 s"), (9.99, "10.0 s"), (10, "10 s"), (59.4, "59 s"),
        (59.6, "1 min 00 s"), (60, "1 min 00 s"), (252, "4 min 12 s"), (3599, "59 min 59 s"),
        (3599.7, "1 h 00 min"), (3600, "1 h 00 min"),
        (7325, "2 h 02 min"), (11_100, "3 h 05 min"), (90_061, "25 h 01 min"),
        (48 * 3600 - 1, "47 h 59 min"), (48 * 3600, "2.0 days"), (2.5 * 86400, "2.5 days"),
    ],
)  # fmt: skip
def test_seconds_at_the_borders_of_units(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
