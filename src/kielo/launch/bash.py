"""Lines of bash: values of Python → assignments that bash reads back as they are, comments and requests."""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from kielo.recipe.complaints import CONTROL
from kielo.recipe.errors import KieloError


def assign(name: str, value: str) -> str:
    return f"{name}={quoted(value) if value else ''}"


def array(name: str, words: Iterable[str]) -> str:
    return f"{name}=({' '.join(map(quoted, words))})"


def quoted(text: str) -> str:
    """Return the text for bash. Commas are in quotes, because they look like a mistake between words."""
    return f"'{text}'" if "," in text and shlex.quote(text) == text else shlex.quote(text)


def exports(variables: Mapping[str, str]) -> list[str]:
    return [f"export {name}={quoted(value)}" for name, value in variables.items()]


def comment(text: str) -> str:
    """Return the text as one line of a comment, because a line break would begin a command."""
    return f"# {CONTROL.sub(' ', text)}"


def request(prefix: str, options: Iterable[str]) -> list[str]:
    """Return a line for each non-empty option. Raises KieloError for a control character or a quote."""
    given = [option for option in options if option]
    for option in given:
        if CONTROL.search(option) or option.count('"') not in (0, 2):
            raise KieloError(
                f"{option!r} cannot be asked of a scheduler: it has a line break, another control character "
                "or a quote. Fix: a name without"
            )
    return [f"{prefix} {option}" for option in given]


def start_of(script: str | Path) -> str:
    """Return the command that starts a script, for a person to paste."""
    return f"bash {shlex.quote(str(script))}"
