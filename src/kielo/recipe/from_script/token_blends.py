"""Blends of token files (--data-path WEIGHT PREFIX …) to sources and a mixture."""

import re
from collections.abc import Sequence
from math import isfinite
from typing import Any

from kielo.recipe.from_script.script_arguments import NOT_HONOURED, TRANSLATED, Translation


def weighted_splits(text: str) -> list[str]:
    """Return weights and prefixes of BigScience's "NAME: WEIGHT BEGIN:END PREFIX, …"."""
    found = []
    for part in (
        re.sub(r"[\"']?\s*\w+\s*:\s(?=[\d.])", "", text, count=1)
        .replace('"', " ")
        .replace("'", " ")
        .split(",")
    ):
        words = part.split()
        if not words:
            continue
        if len(words) != 3 or ":" not in words[1]:
            raise ValueError(part)
        found += [words[0], words[2]]
    return found


def put_blend(to: Translation, name: str, words: Sequence[str]) -> None:
    """Make a source of each prefix, and the mixture of their weights."""
    words = [one for word in words for one in word.split()]
    weights: list[float | int] = []
    prefixes = list(words)
    if len(words) > 1 and _number(words[0]) is not None:
        numbers = [_number(word) for word in words[::2]]
        if len(words) % 2 or None in numbers or any(_number(word) is not None for word in words[1::2]):
            to.refuse("is no list of WEIGHT PREFIX. Fix: a weight before each prefix", name)
            return
        weights, prefixes = [number for number in numbers if number is not None], words[1::2]
    if not prefixes:
        to.drop(name, "it has no prefix")
        return
    joined: dict[str, float | int] = {}
    for number, prefix in enumerate(prefixes):
        joined[prefix] = joined.get(prefix, 0) + (weights[number] if weights else 1)
    empty = [prefix for prefix, weight in joined.items() if weight <= 0]
    used = {prefix: weight for prefix, weight in joined.items() if weight > 0}
    if not used:
        to.refuse("has no weight above 0", name)
        return
    names = source_names(list(used))
    sources: list[dict[str, Any]] = [{"name": names[prefix], "tokens": prefix} for prefix in used]
    to.keys["corpus.sources"] = (sources, name)
    to.say(name, TRANSLATED, f"sources of tokens: {len(sources)}")
    if weights:
        to.keys["dataset.mixture"] = ({names[prefix]: weight for prefix, weight in used.items()}, name)
    if empty:
        to.say(name, NOT_HONOURED, f"without {', '.join(empty)}, whose weight is 0")


def source_names(prefixes: Sequence[str]) -> dict[str, str]:
    """Return a short name for each prefix: the file's, with folders before it if files share a name."""
    found = {prefix: _name(prefix, 1) for prefix in prefixes}
    deepest = max((prefix.count("/") for prefix in prefixes), default=0) + 1
    for level in range(2, deepest + 1):
        names = list(found.values())
        found = {key: _name(key, level) if names.count(name) > 1 else name for key, name in found.items()}
    taken: set[str] = set()
    for prefix, name in found.items():
        free = (f"{name}_{number}" for number in range(2, len(found) + 3))
        found[prefix] = (
            name if name not in taken and name != "heldout" else next(n for n in free if n not in taken)
        )
        taken.add(found[prefix])
    return found


def _name(prefix: str, level: int) -> str:
    parts = [part for part in prefix.split("/") if part]
    stem = re.sub(r"(\.jsonl?)?(_text)?(_(document|sentence))?$", "", "_".join(parts[-level:]))
    return re.sub(r"[^A-Za-z0-9_-]+", "_", stem).strip("_-")[-90:].strip("_-") or "text"


def _number(word: str) -> float | int | None:
    if re.fullmatch(r"\d+", word):
        return int(word)
    try:
        number = float(word)
    except ValueError:
        return None
    return number if isfinite(number) else None
