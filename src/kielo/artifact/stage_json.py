"""JSON files that stages exchange, written and read through their types, which `formats.py` lists.

The keys in a file are in the order in which the type declares them.
"""

from pathlib import Path
from typing import ClassVar, TypeVar

import xxhash
from pydantic import ValidationError

from kielo.artifact.json_object import JsonObject, Kind, checked, first_wrong
from kielo.artifact.manifest import MANIFEST_NAME, Manifest, read_manifest, write_json_atomically
from kielo.recipe.errors import KieloError


class JsonFile(JsonObject):
    FILE_NAME: ClassVar[str]


File = TypeVar("File", bound=JsonFile)


def write_json(folder: Path | str, file: JsonFile) -> None:
    """Write the file into `folder`, whole or not at all. NaN and infinity are written literally."""
    write_json_atomically(Path(folder) / file.FILE_NAME, file.content())


def read_json(folder: Path | str, kind: type[File]) -> File | None:
    """Read the file of this kind in `folder`; None without it. KieloError with the file and the wrong key."""
    path = Path(folder) / kind.FILE_NAME
    return None if (data := _read(path)) is None else _parse(data, path, kind)


def read_stage_json(folder: Path | str, kind: type[File]) -> File | None:
    """Do as `read_json`, in the folder of a finished stage. KieloError if it was changed since."""
    path = Path(folder) / kind.FILE_NAME
    again = f". Fix: move {path.parent} away and run the stage again"
    if (data := _read(path)) is None:
        return None
    content = _parse(data, path, kind, again)
    manifest = read_manifest(folder)
    listed = manifest.files.get(kind.FILE_NAME) if manifest else None
    if listed is not None and listed.xxh3_128 != xxhash.xxh3_128_hexdigest(data):
        raise KieloError(f"{path}: was changed since the stage wrote it{again}")
    return content


def read_counts(folder: Path | str, kind: type[Kind]) -> Kind | None:
    """Read the typed counts of a finished stage, else None. KieloError with manifest and wrong key."""
    return None if (manifest := read_manifest(folder)) is None else counts_of(folder, manifest, kind)


def counts_of(folder: Path | str, manifest: Manifest, kind: type[Kind]) -> Kind:
    advice = f". Fix: move {folder} away and run the stage again"
    return checked(Path(folder) / MANIFEST_NAME, kind, manifest.counts, advice, "counts.")


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _parse(data: bytes, path: Path, kind: type[File], advice: str = "") -> File:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise KieloError(f"{path}: not as Kielo writes it ({first_wrong(error)}){advice}") from None
