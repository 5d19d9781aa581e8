"""The text of `index.json`: a head, then a line for each tensor, so that a reader parses only what it needs.

The whole is one JSON object. The head is its first line: all keys but "tensors", and as "lines" the bytes of
each tensor's line. An index of one line, without "lines", is an older one.
"""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

_TENSORS_FOLLOW = b', "tensors": {\n'
_END = b"}}\n"


def index_text(head: Mapping[str, Any], entries: Mapping[str, str]) -> Iterator[bytes]:
    """Yields the text in parts. entries: tensor → the JSON of its entry."""
    lines = {name: f"{json.dumps(name)}: {entry},\n".encode() for name, entry in entries.items()}
    if lines:
        last = next(reversed(lines))
        lines[last] = lines[last].removesuffix(b",\n") + b"\n"
    sizes = {name: len(line) for name, line in lines.items()}
    yield json.dumps({**head, "lines": sizes}).encode().removesuffix(b"}") + _TENSORS_FOLLOW
    yield from lines.values()
    yield _END


def read_head(file: BinaryIO) -> dict[str, Any]:
    """Reads the head, and leaves the file at the first tensor's line. An older index is returned whole.

    Raises ValueError for what is not JSON.
    """
    head = file.readline()
    if head.endswith(_TENSORS_FOLLOW):
        return json.loads(head.removesuffix(_TENSORS_FOLLOW) + b"}")
    return json.loads(head + file.read())


def read_entries(file: BinaryIO, lines: Mapping[str, int], names: set[str]) -> dict[str, Any]:
    """Reads the entries of those tensors of `names` that `lines` has; the file is where `read_head` left it.

    Raises ValueError, TypeError or AttributeError for lines that are not what was written.
    """
    begin, entries = file.tell(), {}
    if begin + sum(lines.values()) + len(_END) != os.fstat(file.fileno()).st_size:
        raise ValueError("its lines do not make up the file")
    for name, num_bytes in lines.items():
        if name in names:
            file.seek(begin)
            line = json.loads(b"{" + file.read(num_bytes).rstrip(b",\n") + b"}")
            if list(line) != [name]:
                raise ValueError(f"the line of {name} is that of {', '.join(line)}")
            entries |= line
        begin += num_bytes
    return entries
