"""Kielo's own texts in folders where people keep theirs, such as a model card: their last line marks them.

That line is a comment with a checksum of the text above it. Kielo replaces such a text if nobody has changed
it, and refuses any other file of that name.
"""

import json
import os
import re
from pathlib import Path

import xxhash

from kielo.artifact.durable import DurableFile
from kielo.recipe.errors import KieloError

HTML_COMMENT, HASH_COMMENT = "<!-- {} -->", "# {}"  # Markdown and SVG; TOML
_MARK = "written by kielo, which replaces this file while the text above has the xxh3_128 {}"
_MAX_BYTES = 64 * 2**20  # larger files are not read, and are not Kielo's
_LAST_LINE = re.compile(rb"[^\n]*" + re.escape(_MARK.format("")).encode() + rb"([0-9a-f]{32})[^\n]*\n")


def marked(text: str, comment: str = HTML_COMMENT) -> str:
    """Return `text`, which ends in a line end, with the line that marks it as Kielo's."""
    return text + comment.format(_MARK.format(xxhash.xxh3_128_hexdigest(text.encode()))) + "\n"


def is_own_text(path: Path | str) -> bool:
    """Return True if Kielo wrote the file and nobody changed it since. OSError if it cannot be read."""
    path = Path(path)
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return False
    content = path.read_bytes()
    begin = content.rfind(b"\n", 0, -1) + 1
    mark = _LAST_LINE.fullmatch(content, begin)
    return mark is not None and mark[1].decode() == xxhash.xxh3_128_hexdigest(content[:begin])


def refuse_other_text(path: Path | str) -> None:
    """Raise KieloError if the name belongs to anything but Kielo's own text."""
    path = Path(path)
    if path.is_symlink() and not path.exists():
        raise KieloError(f"{path}: a symbolic link that leads nowhere. Fix: remove it; nothing was written")
    if path.exists() and not (path.is_file() and is_own_text(path)):
        raise KieloError(
            f"{path}: exists, and Kielo did not write it or it was changed since. Fix: move it away; "
            "nothing was written"
        )


def refuse_other_json(path: Path | str, key: str) -> None:
    """Raise KieloError if the name belongs to anything but Kielo's own JSON, an object with `key`."""
    path = Path(path)
    try:
        is_own = key in json.loads(path.read_text(encoding="utf-8")) if os.path.lexists(path) else True
    except (OSError, ValueError, TypeError):
        is_own = False
    if not is_own:
        raise KieloError(
            f"{path}: exists, and Kielo did not write it. Fix: move it away; nothing was written"
        )


def write_own_text(path: Path | str, text: str, comment: str = HTML_COMMENT) -> None:
    """Write `text` with its mark, aside and renamed. Errors as in `refuse_other_text`."""
    refuse_other_text(path)
    with DurableFile(path) as file:
        file.write(marked(text, comment).encode())
