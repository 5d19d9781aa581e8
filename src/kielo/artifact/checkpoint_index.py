"""The checkpoint folder on disk, without torch: its name, its `index.json`, and whether it is whole.

    checkpoints/step_00000100/
        rank_00000.safetensors ...   pieces of tensors, keys `NAME@offset,offset`
        index.json                   every tensor: dtype, shape, which piece lies where; and the plain JSON state
        manifest.json                bytes and xxh3_128 of each file above; written last

A folder without manifest is not a checkpoint. Nothing here is ever pickled.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kielo.artifact.manifest import MANIFEST_NAME, hash_file, read_manifest
from kielo.recipe.errors import KieloError

INDEX_NAME = "index.json"
VERSION = 1
_STEP_FOLDER = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: `shape` elements from `offset`, stored whole under `key` of `file`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True)
class TensorEntry:
    """dtype is a safetensors name ("F32", "BF16", "I64"); the chunks cover `shape` without overlap."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class CheckpointIndex:
    """`aliases`: a tied tensor's name → the name that it is stored under."""

    step: int
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)

    def names(self) -> list[str]:
        return [*self.tensors, *self.aliases]

    def entry(self, name: str) -> TensorEntry | None:
        return self.tensors.get(self.aliases.get(name, name))

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)})


def chunk_key(name: str, offset: Iterable[int]) -> str:
    return f"{name}@{','.join(map(str, offset))}"


def parse_index(text: str, where: Path | str) -> CheckpointIndex:
    """`index.json` as text → index. KieloError, naming the file, for anything but a sound index."""
    try:
        stored = json.loads(text)
        if stored["version"] != VERSION:
            raise KieloError(
                f"{where}: index version {stored['version']}; this Kielo reads version {VERSION}"
            )
        tensors = {name: _entry(entry) for name, entry in stored["tensors"].items()}
        index = CheckpointIndex(stored["step"], tensors, stored["aliases"], stored["plain"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KieloError(f"{where}: not a checkpoint index ({error!r})") from error
    for name, entry in index.tensors.items():
        if sum(math.prod(chunk.shape) for chunk in entry.chunks) != math.prod(entry.shape):
            raise KieloError(f"{where}: the pieces of {name} do not make up its shape {list(entry.shape)}")
    for alias, name in index.aliases.items():
        if name not in index.tensors:
            raise KieloError(f"{where}: {alias} is tied to {name}, which is not there")
    return index


def _entry(stored: dict[str, Any]) -> TensorEntry:
    chunks = tuple(
        Chunk(tuple(chunk["offset"]), tuple(chunk["shape"]), chunk["file"], chunk["key"])
        for chunk in stored["chunks"]
    )
    return TensorEntry(stored["dtype"], tuple(stored["shape"]), chunks)


def read_index(folder: Path) -> CheckpointIndex:
    path = Path(folder) / INDEX_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KieloError(f"{folder} is not a checkpoint: {INDEX_NAME} cannot be read ({error})") from error
    return parse_index(text, path)


def step_folder_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """100 for `.../step_00000100`; None for any other name (`.partial`, `.damaged`, ...)."""
    match = _STEP_FOLDER.fullmatch(Path(folder).name)
    return int(match[1]) if match else None


def step_folders(folder: Path) -> list[Path]:
    """The folders named as checkpoints inside `folder`, newest first; whether they are whole is not looked at."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def listed_files(folder: Path) -> dict[str, dict[str, Any]]:
    """The manifest's files. KieloError where a checkpoint folder has no manifest, or one without an index."""
    path = Path(folder) / MANIFEST_NAME
    try:
        manifest = read_manifest(folder)
    except (KieloError, OSError) as error:
        raise KieloError(f"{path} cannot be read, so nothing vouches for the files beside it") from error
    if manifest is None:
        raise KieloError(f"{path} is missing: the save did not finish")
    if INDEX_NAME not in manifest.files:
        raise KieloError(f"{path} does not list {INDEX_NAME}")
    return manifest.files


def find_damage(
    folder: Path, names: Iterable[str], files: dict[str, dict[str, Any]], checksums: bool = True
) -> str | None:
    """The first of `names` that is missing, cut short or altered against `files`, and how; None if all are sound.

    Without `checksums` only the sizes are compared, which reads nothing.
    """
    for name in names:
        path, expected = Path(folder) / name, files[name]
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{name} is {size} bytes long instead of {expected['bytes']}"
            if checksums and hash_file(path) != expected["xxh3_128"]:
                return f"{name} is not what was written (its checksum differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def check_checkpoint(folder: Path, checksums: bool = True) -> str | None:
    """What is wrong with one checkpoint folder, naming the file; None if it is whole."""
    try:
        files = listed_files(folder)
    except KieloError as error:
        return str(error)
    return find_damage(folder, sorted(files), files, checksums)


def list_checkpoints(folder: Path, checksums: bool = False) -> list[dict[str, Any]]:
    """The checkpoints in `folder`, newest first: {"name", "step", "bytes", "state": "complete" or what is wrong}."""
    rows = []
    for path in step_folders(folder):
        damage = check_checkpoint(path, checksums)
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        state = "complete" if damage is None else f"damaged: {damage}"
        rows.append({"name": path.name, "step": step_of(path), "bytes": size, "state": state})
    return rows


def newest_complete(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint in `folder`, and a warning for each newer one that is damaged. Changes nothing."""
    warnings = []
    for path in step_folders(folder):
        damage = check_checkpoint(path)
        if damage is None:
            return path, warnings
        warnings.append(f"checkpoint {path} is damaged: {damage}")
    return None, warnings
