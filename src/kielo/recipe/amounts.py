"""Large numbers as people write them: "3B", "350M", "1.5T" → whole numbers, and back."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, PositiveInt

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def parse_amount(value: Any) -> Any:
    """Returns the whole number that a text such as "3B" means; what is no text stays as it is.

    Raises ValueError for another text.
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?)\s*([KMBGT]?)", value.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError("what would work: 3B, 350M, 1.5T or 3_000_000_000")
    figure, unit = re.sub(r"[_,]", "", found[1]), _UNITS.get(found[2].upper(), 1)
    whole, _, places = figure.partition(".")
    if len(whole) > 18:
        raise ValueError("what would work: a number below 2**63, such as 3B")
    return int(whole) * unit + int(places or 0) * unit // 10 ** len(places)


def parse_device_hours(text: str) -> int | None:
    """Returns the hours in "20000h" or "1.5M GPU-hours"; None for a text that is no device-hours."""
    found = re.fullmatch(
        r"\s*([\d_.,]+\s*[KM]?)\s*(?:h|(?:GPU|device)[- ]?h(?:ours?)?)\s*", text, re.IGNORECASE
    )
    return parse_amount(found[1]) if found else None


def short_amount(number: int) -> str:
    """Returns the number with the largest unit that keeps two digits after the point: "3B", "1.24B"."""
    for unit in ("T", "B", "M", "K"):
        if number >= _UNITS[unit]:
            return f"{number / _UNITS[unit]:.2f}".rstrip("0").rstrip(".") + unit
    return str(number)


Amount = Annotated[PositiveInt, BeforeValidator(parse_amount, json_schema_input_type=int | str)]
