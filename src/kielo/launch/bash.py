"""Lines of bash: values of Python → assignments that bash reads back as they are."""

import shlex
from collections.abc import Iterable, Mapping


def assign(name: str, value: str) -> str:
    return f"{name}={quoted(value) if value else ''}"


def array(name: str, words: Iterable[str]) -> str:
    return f"{name}=({' '.join(map(quoted, words))})"


def quoted(text: str) -> str:
    """Returns the text for bash; with commas in quotes, for they look like a mistake between words."""
    return f"'{text}'" if "," in text and shlex.quote(text) == text else shlex.quote(text)


def exports(variables: Mapping[str, str]) -> list[str]:
    return [f"export {name}={quoted(value)}" for name, value in variables.items()]
