"""Large numbers as people write them, "3B", "350M", "1.5T" → whole numbers, and back; durations."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, PositiveInt

# Commas separate thousands. 1,5 is refused: it could be one and a half.
_NUMBER = re.compile(
    r"(?P<whole>\d+(?:_\d+)*|\d{1,3}(?:,\d{3})+)(?:\.(?P<places>\d+))?(?:e\+?(?P<power>\d{1,2}))?\s*(?P<unit>[KMBGT]?)",
    re.IGNORECASE,
)
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def parse_amount(value: Any) -> Any:
    """Return the whole number that a text such as "3B" or "1e9" means. Other values than text stay.

    Raises ValueError for other text, and for a number that is not whole.
    """
    if not isinstance(value, str):
        return value
    found = _NUMBER.fullmatch(value.strip())
    if found is None:
        raise ValueError("Fix: 3B, 350M, 1.5T or 3_000_000_000")
    figure, places = re.sub(r"[_,]", "", found["whole"]), found["places"] or ""
    if len(figure) + int(found["power"] or 0) > 18:
        raise ValueError("Fix: a number below 2**63, such as 3B")
    number = int(figure + places) * 10 ** int(found["power"] or 0) * _UNITS.get(found["unit"].upper(), 1)
    whole, rest = divmod(number, 10 ** len(places))
    if rest:
        raise ValueError(f"{value} is no whole number. Fix: 3B, 350M, 1.5T or 3_000_000_000")
    return whole


def is_amount(value: Any) -> bool:
    return isinstance(value, str) and _NUMBER.fullmatch(value.strip()) is not None


def parse_device_hours(text: str) -> int | None:
    """Return the hours in "20000h" or "1.5M GPU-hours"; None for other text."""
    found = re.fullmatch(
        r"\s*([\d_.,]+\s*[KM]?)\s*(?:h|(?:GPU|device)[- ]?h(?:ours?)?)\s*", text, re.IGNORECASE
    )
    return parse_amount(found[1]) if found else None


def multiples_around(number: int, unit: int) -> list[int]:
    """Return the multiples of `unit` next to `number`, below and above, without 0."""
    below = number // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple]


def short_amount(number: float) -> str:
    """Return the number in its largest unit with up to two decimals, "1.24B"; three digits below 1000."""
    for unit in ("T", "B", "M", "K"):
        if number >= _UNITS[unit]:
            return f"{number / _UNITS[unit]:.2f}".rstrip("0").rstrip(".") + unit
    return f"{number:.3g}"


def format_seconds(seconds: float) -> str:
    """Return 0.4 s, 38 s, 4 min 12 s, 3 h 05 min or, from two days on, 2.5 days."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{seconds / 86400:.1f} days"


Amount = Annotated[PositiveInt, BeforeValidator(parse_amount, json_schema_input_type=int | str)]
