"""Faults of a checkpoint: their kinds, and the check of its files against the records of its manifest."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kielo.artifact import block_digests
from kielo.artifact.checkpoint_folder import INDEX_NAME, VERSION, os_error_text
from kielo.artifact.checkpoint_index_lines import read_head
from kielo.artifact.manifest import MANIFEST_NAME
from kielo.recipe.errors import KieloError

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


@dataclass(frozen=True)
class Fault:
    """Why a checkpoint cannot be used.

    kind: "damaged" (a file is missing, or is not what was written), "unreadable" (the file system did not
    give a file, which says nothing about the file) or "of another version" (of this format). Only damage may
    be passed over for an older checkpoint; the others are refused, and nothing is renamed for them.
    """

    kind: Literal["damaged", "unreadable", "of another version"]
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


class FaultyCheckpoint(KieloError):
    """The checkpoint at `path` cannot be used; `fault` says why."""

    def __init__(self, path: Path | str, fault: Fault):
        super().__init__(f"checkpoint {path} is {fault}")
        self.fault = fault


def fault_of_reading(name: str, error: OSError | UnicodeDecodeError) -> Fault:
    """Returns the fault of a checkpoint whose file `name` could not be read because of `error`."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return Fault("damaged", f"{name} is missing")
    if isinstance(error, UnicodeDecodeError):
        return Fault("damaged", f"{name} is not what was written ({error})")
    return Fault("unreadable", f"{name}: {os_error_text(error)}; try again when the file system is back")


def another_version(name: str, version: Any, written_by: str = "") -> Fault:
    """Returns the fault of a checkpoint whose file `name` is of another version of this format."""
    return Fault(
        "of another version",
        f"{name} is of version {version}{written_by}, and this Kielo reads version {VERSION}; go on with "
        "the Kielo that wrote it",
    )


def find_fault(
    folder: Path, names: Iterable[str], files: dict[str, dict[str, Any]], checksums: bool = True
) -> Fault | None:
    """Returns the fault of the first of `names` that has one; None if all files are sound.

    A file may be missing, cut short, altered, of another save or unreadable. Without `checksums` only sizes
    and save ids are compared, which reads little.
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


def _file_damage(path: Path, expected: dict[str, Any], checksums: bool) -> str | None:
    size, save_id = path.stat().st_size, _save_id_inside(path)
    damage = None
    if size != expected["bytes"]:
        damage = f"is {size} bytes long instead of {expected['bytes']}"
    elif checksums:
        block = block_digests.first_wrong_block(path, expected["xxh3_64_blocks"])
        if block is not None:
            start, end = block * block_digests.BLOCK_BYTES, min((block + 1) * block_digests.BLOCK_BYTES, size)
            place = f"block {block} (bytes {start:,} to {end - 1:,})"
            damage = f"is not what was written: {place} has another checksum"
    if save_id == expected["save_id"]:
        return damage
    if save_id is None:
        return damage or "does not say of which save it is"
    stale = f"is of another save ({save_id} instead of {expected['save_id']})"
    return f"{stale}, and {damage}" if damage else stale


def _save_id_inside(path: Path) -> str | None:
    """Reads the save id in a file: the index's JSON or a safetensors header; None where it has none."""
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
