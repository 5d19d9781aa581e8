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
    """The content of a JSON file with the name `FILE_NAME` in its folder."""

    FILE_NAME: ClassVar[str]


File = TypeVar("File", bound=JsonFile)


def write_json(folder: Path | str, file: JsonFile) -> None:
    """Write the file into `folder`, whole or not at all. NaN and infinity are written literally."""
    write_json_atomically(Path(folder) / file.FILE_NAME, file.content())


def read_json(folder: Path | str, kind: type[File]) -> File | None:
    """Read the file of this kind in `folder`; None if it does not exist.

    Raises KieloError with the file and the first wrong key if its content does not fit.
    """
    data = _read(Path(folder) / kind.FILE_NAME)
    return None if data is None else _parse(data, Path(folder) / kind.FILE_NAME, kind)


def read_stage_json(folder: Path | str, kind: type[File]) -> File | None:
    """Read the file of this kind in the folder of a finished stage; None if it does not exist.

    Raises KieloError as `read_json` does, and if its checksum is not the manifest's.
    """
    path = Path(folder) / kind.FILE_NAME
    again = f". Fix: move {path.parent} away and run the stage again"
    data = _read(path)
    if data is None:
        return None
    content = _parse(data, path, kind, again)
    manifest = read_manifest(folder)
    listed = manifest.files.get(kind.FILE_NAME) if manifest else None
    if listed is not None and listed.xxh3_128 != xxhash.xxh3_128_hexdigest(data):
        raise KieloError(f"{path}: was changed since the stage wrote it{again}")
    return content


def read_counts(folder: Path | str, kind: type[Kind]) -> Kind | None:
    """Read the typed counts of a finished stage (`stage_counts.py`); None if it is not finished.

    Raises KieloError with the manifest and the first wrong key if they do not fit.
    """
    manifest = read_manifest(folder)
    return None if manifest is None else counts_of(folder, manifest, kind)


def counts_of(folder: Path | str, manifest: Manifest, kind: type[Kind]) -> Kind:
    """Return the typed counts of the manifest in `folder`. Raise as `read_counts` does."""
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
