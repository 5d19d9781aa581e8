"""The code blocks of the pages, and the commands in them.

The line that opens a block has its kind, `sh`, `toml`, `python` or `text`; after it `not run: REASON` for
what needs a cluster, a GPU or a download, or `exits N` for commands that are refused on purpose.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.house.checks import ROOT

KINDS = ("sh", "toml", "python", "text")


class Block(NamedTuple):
    """One code block. note: what follows its kind. line: of the page, of its first line."""

    page: str
    line: int
    kind: str
    note: str
    text: str

    @property
    def reason_not_run(self) -> str:
        return self.note.removeprefix("not run: ") if self.note.startswith("not run: ") else ""

    @property
    def exit_code(self) -> int:
        return int(self.note.removeprefix("exits ")) if self.note.startswith("exits ") else 0

    @property
    def is_known(self) -> bool:
        """Returns False for a kind or a note that nothing reads."""
        return self.kind in KINDS and bool(re.fullmatch(r"|not run: \S.*|exits \d+", self.note))

    def commands(self) -> list[str]:
        """Returns what the list of documented commands has of this block: of `sh` each command, without its
        comment, else the first line that says something. `text` has none.
        """
        if self.kind == "text":
            return []
        lines = [line.partition(" #")[0].strip() for line in self.text.replace("\\\n", " ").splitlines()]
        lines = [" ".join(line.split()) for line in lines if line and not line.startswith("#")]
        return lines if self.kind == "sh" else [f"{self.kind}: {lines[0]}"]


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """Yields the blocks of a page in order."""
    opened, kept = None, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.fullmatch(r" *```(.*)", line)
        if fence is None:
            kept.append(line)
        elif opened is None:
            kind, _, note = fence[1].strip().partition(" ")
            opened, kept = (number + 1, kind, note), []
        else:
            first, kind, note = opened
            yield Block(str(page.relative_to(ROOT)), first, kind, note, "\n".join(kept) + "\n")
            opened = None
    if opened is not None:
        raise ValueError(f"{page}:{opened[0] - 1}: this block has no end")
