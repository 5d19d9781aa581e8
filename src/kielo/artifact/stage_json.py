"""JSON files that stages exchange: each has a type, and is written and read through it.

The types are in files beside this one (`scores.py`, `verify_results.py`, …); `formats.py` lists them. The
keys in a file are in the order in which the type declares them.
"""

from pathlib import Path
from typing import ClassVar, TypeVar

import xxhash
from pydantic import ValidationError

from kielo.artifact.json_object import JsonObject, Kind, checked, first_wrong
from kielo.artifact.manifest import MANIFEST_NAME, Manifest, read_manifest, write_json_atomically
from kielo.recipe.errors import KieloError


class JsonFile(JsonObject):
    """The content of a whole JSON file, which has the name `FILE_NAME` in its folder."""

    FILE_NAME: ClassVar[str]


File = TypeVar("File", bound=JsonFile)


def write_json(folder: Path | str, file: JsonFile) -> None:
    """Write the file into `folder`, whole or not at all. NaN and infinity are written as such."""
    write_json_atomically(Path(folder) / file.FILE_NAME, file.content())


def read_json(folder: Path | str, kind: type[File]) -> File | None:
    """Read the file of this kind in `folder`; None where there is no such file.

    Raises KieloError, naming the file and the first wrong key, when it is not as Kielo writes it.
    """
    data = _read(Path(folder) / kind.FILE_NAME)
    return None if data is None else _parse(data, Path(folder) / kind.FILE_NAME, kind)


def read_stage_json(folder: Path | str, kind: type[File]) -> File | None:
    """Read the file of this kind in the folder of a finished stage; None where there is no such file.

    Raises KieloError as `read_json` does, and when the file is not the one that the stage's manifest lists.
    """
    path = Path(folder) / kind.FILE_NAME
    again = f"; move {path.parent} away and run the stage again"
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
    """Read the counts of a finished stage as their type (`stage_counts.py`); None where none is finished.

    Raises KieloError, naming the manifest and the first wrong key, when they are not as Kielo writes them.
    """
    manifest = read_manifest(folder)
    return None if manifest is None else counts_of(folder, manifest, kind)


def counts_of(folder: Path | str, manifest: Manifest, kind: type[Kind]) -> Kind:
    """Return the counts of the manifest in `folder` as their type; raise what `read_counts` does."""
    advice = f"; move {folder} away and run the stage again"
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
