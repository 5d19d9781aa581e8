"""JSON files that stages exchange: each has a type, and is written and read through it.

The types are in files beside this one (`scores.py`, `verify_results.py`, …); `formats.py` lists them. The
keys in a file are in the order in which the type declares them.
"""

from pathlib import Path
from typing import Any, ClassVar, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from kielo.artifact.manifest import read_manifest, write_json_atomically
from kielo.recipe.errors import KieloError


class JsonObject(BaseModel):
    """An object in a JSON file. Values are of exactly the declared types, and never changed.

    Unknown keys are kept: a newer Kielo may write more. A field with a default is not in files of every
    version.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", use_attribute_docstrings=True)

    def content(self) -> dict[str, Any]:
        """Returns the object as it is written: without the defaults of keys that were not given."""
        return self.model_dump(exclude_unset=True)


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
    if listed is not None and listed["xxh3_128"] != xxhash.xxh3_128_hexdigest(data):
        raise KieloError(f"{path}: was changed since the stage wrote it{again}")
    return content


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _parse(data: bytes, path: Path, kind: type[File], advice: str = "") -> File:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        wrong = f"{where}: {first['msg']}" if where else first["msg"]
        raise KieloError(f"{path}: not as Kielo writes it ({wrong}){advice}") from None
