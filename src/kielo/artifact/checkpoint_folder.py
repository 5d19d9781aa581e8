"""The checkpoint folder on disk, without torch: its files, their names and faults, and the folders of a run.

    checkpoints/step_00000100/
        rank_00000.safetensors ...  chunks of tensors, keys `NAME@offset,offset`
        index.json                  dtype, shape and chunks of every tensor; plain JSON state
        manifest.json               size and checksums of each file above, and of itself; written last
    checkpoints/newest              a symbolic link for people; readers choose by step and checksums

Every save has an id, which each of its files stores, so that a file of another save is recognised. A folder
without a manifest is not a checkpoint. Nothing is ever pickled.
"""

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash

from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import MANIFEST_NAME, READ_BYTES, FileRecord
from kielo.recipe.errors import KieloError

VERSION = 2  # of the index and of the manifest
INDEX_NAME = "index.json"
NEWEST_NAME = "newest"
_STEP_FOLDER = re.compile(r"step_(\d{8,})")
_RANK_FILE = re.compile(r"rank_(\d{5,})\.safetensors")


def step_folder_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(folder: Path | str) -> int | None:
    """Return 100 for `.../step_00000100`; None for any other name (`.partial`, `.damaged`, ...)."""
    match = _STEP_FOLDER.fullmatch(Path(folder).name)
    return int(match[1]) if match else None


def saved_step(folder: Path) -> int:
    """Return the step of a folder with a checkpoint's name. Raises ValueError for another name."""
    if (step := step_of(folder)) is None:
        raise ValueError(f"{folder} is not named as a checkpoint")
    return step


def rank_file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def rank_of(file_name: str) -> int | None:
    """Return the rank that wrote the file, or None for files that rank 0 writes for all ranks."""
    match = _RANK_FILE.fullmatch(file_name)
    return int(match[1]) if match else None


def step_folders(folder: Path) -> list[Path]:
    """Return the folders of checkpoints in `folder`, newest first. KieloError if it cannot be listed."""
    folder = Path(folder)
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if step_of(entry.name) is not None and entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        what = f"{folder}: {os_error_text(error)}. Fix: retry when the file system is back"
        raise KieloError(what) from error
    return sorted((folder / name for name in names), key=saved_step, reverse=True)


def newest_written(folder: Path) -> str:
    """Return the name of the newest checkpoint in `folder` that has its manifest, or ""."""
    return next((path.name for path in step_folders(folder) if (path / "manifest.json").exists()), "")


def os_error_text(error: OSError) -> str:
    """Return the reason and the errno's name: "Input/output error (EIO)"."""
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, error.errno)})"


def run_around(path: Path) -> Path | None:
    """Return the folder of the run that contains `path`, absolute and without links, None outside a run."""
    return next(
        (parent for parent in path.resolve().parents if (parent / "train" / "checkpoints").is_dir()), None
    )


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
# each tensor's line. An older index, or an edited one, is one line.
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
    head = file.readline()
    if head.endswith(_TENSORS_FOLLOW):
        return json.loads(head.removesuffix(_TENSORS_FOLLOW) + b"}")
    return json.loads(head + file.read())


def read_entries(file: BinaryIO, lines: Mapping[str, int], names: set[str]) -> JsonTable:
    """Read the entries of `names`, after `read_head`. ValueError, TypeError, AttributeError if damaged."""
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


MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


class CheckpointFile(FileRecord):
    xxh3_64_blocks: list[str]
    save_id: str  # the file has it too


Files = Mapping[str, CheckpointFile]  # by name


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


def find_fault(folder: Path, names: Iterable[str], files: Files, checksums: bool = True) -> Fault | None:
    """Return the fault of the first of `names` that has one. Without `checksums`: by size and save id."""
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
    try:
        with open(path, "rb") as file:
            if path.name == INDEX_NAME:
                return read_head(file)["save_id"]
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > MAX_HEADER_BYTES:
                return None
            return json.loads(file.read(header_bytes))["__metadata__"]["save_id"]
    except (ValueError, KeyError, TypeError):
        return None
