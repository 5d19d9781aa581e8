"""Characters that no name and no path may have: they end a line of a script, a log or a table."""

import re
from collections.abc import Iterator
from typing import Any

# C0 and C1 of Unicode, and its own ends of a line and a paragraph.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted key, text) of each text in tables and lists, and of the keys themselves."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield key, str(name)
            yield from strings(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from strings(inner, f"{key}[{number}]")
