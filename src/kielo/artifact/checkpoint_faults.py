"""Faults of a checkpoint: checksums by blocks, lines of its index, and the check of its files."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash

from kielo.artifact.checkpoint_folder import INDEX_NAME, VERSION, os_error_text
from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import MANIFEST_NAME, READ_BYTES, FileRecord
from kielo.recipe.errors import KieloError

BLOCK_BYTES = 64 * 2**20  # a checksum covers a block, so that damage has a place


class BlockDigests:
    """The xxh3-64 of each `BLOCK_BYTES` of the data, in hexadecimal. The last block can be shorter."""

    def __init__(self) -> None:
        self._whole: list[str] = []
        self._block, self._block_bytes = xxhash.xxh3_64(), 0

    def update(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            part = left[: BLOCK_BYTES - self._block_bytes]
            left = left[len(part) :]
            self._block.update(part)
            self._block_bytes += len(part)
            if self._block_bytes == BLOCK_BYTES:
                self._whole.append(self._block.hexdigest())
                self._block, self._block_bytes = xxhash.xxh3_64(), 0

    def hexdigests(self) -> list[str]:
        return self._whole + ([self._block.hexdigest()] if self._block_bytes else [])


def first_wrong_block(path: Path, expected: list[str]) -> int | None:
    digests = BlockDigests()
    with open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            digests.update(data)
    pairs = zip_longest(digests.hexdigests(), expected)
    return next((block for block, (found, written) in enumerate(pairs) if found != written), None)


# The text of `index.json` is a JSON object: a head, then a line for each tensor, so that a reader parses only
# the lines that it needs. The head, its first line, has all keys but "tensors", and as "lines" the bytes of
# each tensor's line. An older index is one line without "lines".
_TENSORS_FOLLOW = b', "tensors": {\n'
_END = b"}}\n"


def index_text(head: Mapping[str, Any], entries: Mapping[str, str]) -> Iterator[bytes]:
    """Yield the text in parts. entries: tensor → the JSON of its entry."""
    lines = {name: f"{json.dumps(name)}: {entry},\n".encode() for name, entry in entries.items()}
    if lines:
        last = next(reversed(lines))
        lines[last] = lines[last].removesuffix(b",\n") + b"\n"
    sizes = {name: len(line) for name, line in lines.items()}
    yield json.dumps({**head, "lines": sizes}).encode().removesuffix(b"}") + _TENSORS_FOLLOW
    yield from lines.values()
    yield _END


def read_head(file: BinaryIO) -> JsonTable:
    """Read the head, and leave the file at the first tensor's line. An older index is read whole."""
    head = file.readline()
    if head.endswith(_TENSORS_FOLLOW):
        return json.loads(head.removesuffix(_TENSORS_FOLLOW) + b"}")
    return json.loads(head + file.read())


def read_entries(file: BinaryIO, lines: Mapping[str, int], names: set[str]) -> JsonTable:
    """Read the entries of the tensors `names` that `lines` has, from where `read_head` left the file.

    Raises ValueError, TypeError or AttributeError for other lines than written.
    """
    begin, entries = file.tell(), JsonTable()
    if begin + sum(lines.values()) + len(_END) != os.fstat(file.fileno()).st_size:
        raise ValueError("the lines do not make up the file")
    for name, num_bytes in lines.items():
        if name in names:
            file.seek(begin)
            line = json.loads(b"{" + file.read(num_bytes).rstrip(b",\n") + b"}")
            if list(line) != [name]:
                raise ValueError(f"the line of {name} has {', '.join(line)}")
            entries |= line
        begin += num_bytes
    return entries


_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


class CheckpointFile(FileRecord):
    xxh3_64_blocks: list[str]
    save_id: str
    """The file has it too."""


@dataclass(frozen=True)
class Fault:
    """The reason why a checkpoint cannot be used.

    kind: "damaged" (a file is missing, or differs from what was written), "unreadable" (the file system did
    not give a file, which says nothing about the file) or "of another version" (of this format). Only a
    damaged checkpoint is skipped for an older checkpoint. The others are refused, and nothing is renamed.
    """

    kind: Literal["damaged", "unreadable", "of another version"]
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


class FaultyCheckpoint(KieloError):
    """The checkpoint at `path` cannot be used because of `fault`."""

    def __init__(self, path: Path | str, fault: Fault):
        super().__init__(f"checkpoint {path} is {fault}")
        self.fault = fault


def fault_of_reading(name: str, error: OSError | UnicodeDecodeError) -> Fault:
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return Fault("damaged", f"{name} is missing")
    if isinstance(error, UnicodeDecodeError):
        return Fault("damaged", f"{name} is not what was written ({error})")
    return Fault("unreadable", f"{name}: {os_error_text(error)}. Fix: retry when the file system is back")


def another_version(name: str, version: Any, written_by: str = "") -> Fault:
    return Fault(
        "of another version",
        f"{name} is of version {version}{written_by}, and this Kielo reads version {VERSION}. Fix: the "
        "Kielo that wrote it",
    )


def find_fault(
    folder: Path, names: Iterable[str], files: Mapping[str, CheckpointFile], checksums: bool = True
) -> Fault | None:
    """Return the fault of the first of `names` that has a fault, or None.

    A file can be missing, cut, altered, of another save or unreadable. Without `checksums` only sizes and
    save ids are compared.
    """
    for name in names:
        if name not in files:
            return Fault("damaged", f"{name} is not listed in {MANIFEST_NAME}")
        try:
            damage = _file_damage(Path(folder) / name, files[name], checksums)
        except OSError as error:
            return fault_of_reading(name, error)
        if damage is not None:
            return Fault("damaged", f"{name} {damage}")
    return None


def _file_damage(path: Path, expected: CheckpointFile, checksums: bool) -> str | None:
    size, save_id = path.stat().st_size, _save_id_inside(path)
    damage = None
    if size != expected.bytes:
        damage = f"is {size} bytes long instead of {expected.bytes}"
    elif checksums:
        block = first_wrong_block(path, expected.xxh3_64_blocks)
        if block is not None:
            start, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, size)
            place = f"block {block} (bytes {start:,} to {end - 1:,})"
            damage = f"is not what was written: {place} has another checksum"
    if save_id == expected.save_id:
        return damage
    if save_id is None:
        return damage or "does not say of which save it is"
    stale = f"is of another save ({save_id} instead of {expected.save_id})"
    return f"{stale}, and {damage}" if damage else stale


def _save_id_inside(path: Path) -> str | None:
    """Return the save id in the index's JSON or a safetensors header, or None."""
    try:
        if path.name == INDEX_NAME:
            with open(path, "rb") as file:
                return read_head(file)["save_id"]
        with open(path, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > _MAX_HEADER_BYTES:
                return None
            return json.loads(file.read(header_bytes))["__metadata__"]["save_id"]
    except (ValueError, KeyError, TypeError):
        return None
