"""One raw document, not yet decoded, and what is said of one that cannot be read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kielo.recipe.errors import KieloError

TOO_LONG = "over max_document_bytes"
NOT_UTF8 = "not UTF-8"
NO_TEXT = "no text in the field"
DAMAGED_FILE = "file damaged or not of its format"
UNEQUAL = "a pair without one of its sides"
RAGGED = "another number of columns than other rows"
BAD_MESSAGES = "no list of messages"


class BadRecord(KieloError):
    """A record that is passed over; `reason` is the same for all of a kind, the message names the file."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Record:
    """One raw document, not yet decoded: cheap to skip when another worker takes it.

    `number` is that of its line or row; 0 is the rest of a file that is damaged. `problem` is a fault that is
    known already.
    """

    path: Path
    number: int
    content: Any
    problem: BadRecord | None = None


def too_long(place: str, max_bytes: int) -> BadRecord:
    return BadRecord(
        TOO_LONG, f"{place}: longer than corpus.max_document_bytes = {max_bytes}; cut it, or set more"
    )
