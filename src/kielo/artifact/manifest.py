"""The manifest, the file that marks a stage's folder as finished and lists its inputs.

A stage writes into a folder aside (`stage_folder.py`). At the end every file is hashed and brought to the
disk, `manifest.json` is written last, and the folder takes its name. So a folder with a manifest is complete.
A file that no manifest lists is not Kielo's, and a stage never replaces it.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import xxhash
from pydantic import ValidationError

from kielo.artifact.durable import (
    DurableFile,
    bring_tree_to_disk,
    disk_problems_reported,
    is_aside,
    is_own_text,
)
from kielo.artifact.json_object import JsonObject, JsonTable, first_wrong
from kielo.artifact.stage_folder import StageFolder
from kielo.recipe.errors import KieloError

MANIFEST_NAME = "manifest.json"
READ_BYTES = 1 << 20
DAMAGED_FILE = "file"  # begins the difference of such a file
# Larger files are only measured to decide whether a stage is current.
HASHED_BYTES = 1 << 20
PACKAGES = ("kielo", "numpy", "tokenizers", "torch", "transformers")
Hashes = Mapping[str, str]  # input → its hash
Table = Mapping[str, Any]
Migrate = Callable[[JsonTable], JsonTable]


class FileRecord(JsonObject):
    bytes: int
    xxh3_128: str | None = None  # in hexadecimal; null: it has another checksum, as in checkpoints


class Manifest(JsonObject):
    kind: str
    version: int  # of the stage's output
    inputs: dict[str, str]  # input → its hash
    section: JsonTable
    counts: JsonTable  # the stage's figures; their types are in `stage_counts.py`
    wall_seconds: float
    versions: dict[str, str]  # of Python and of the packages that decide an output
    files: Mapping[str, FileRecord]  # by path relative to the folder
    written_at: str  # date and time in UTC, ISO 8601, to the second

    @classmethod
    def of_now(
        cls,
        kind: str,
        version: int,
        inputs: Mapping[str, str],
        section: Mapping[str, Any],
        counts: Mapping[str, Any],
        wall_seconds: float,
        files: Mapping[str, FileRecord],
    ) -> Self:
        return cls(
            kind=kind,
            version=version,
            inputs=dict(inputs),
            section=as_json(section),
            counts=as_json(counts),
            wall_seconds=round(wall_seconds, 3),
            versions=installed_versions(),
            files=files,
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )


@dataclass
class Stage:
    """A stage that is being made: write files under `folder`, fill `counts`."""

    folder: Path
    counts: JsonTable = field(default_factory=dict)


def read_manifest(folder: Path | str) -> Manifest | None:
    """Return the folder's manifest, or None if the stage is not finished. KieloError for a wrong key."""
    path = Path(folder) / MANIFEST_NAME
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise KieloError(f"{path}: cannot be read ({problem.strerror})") from problem
    except ValidationError as problem:
        raise KieloError(
            f"{path}: not a readable manifest of Kielo's ({first_wrong(problem)}). Fix: move {path.parent} "
            "away, and the stage makes it again"
        ) from None


def finished_manifest(folder: Path | str) -> Manifest:
    manifest = read_manifest(folder)
    if manifest is None:
        raise KieloError(f"{folder}: no {MANIFEST_NAME}, so this stage is not finished. Fix: run it first")
    return manifest


def is_current(
    folder: Path | str, kind: str, version: int, inputs: Hashes, section: Table, migrate: Migrate = dict
) -> bool:
    """Return True if `folder` holds the output of these inputs and this section. Large files: by size alone.

    migrate: a manifest's section of any version → this version.
    """
    return read_manifest(folder) is not None and not differences(
        folder, kind, version, inputs, section, migrate
    )


def differences(
    folder: Path | str, kind: str, version: int, inputs: Hashes, section: Table, migrate: Migrate = dict
) -> list[str]:
    """Return how the finished stage in `folder` differs, in sentences. A file's begins with DAMAGED_FILE."""
    manifest = read_manifest(folder)
    if manifest is None:
        return []
    if (kind, version) != (manifest.kind, manifest.version):
        return [f"kind and version (were {manifest.kind} {manifest.version}, are {kind} {version})"]
    before, now = migrate(manifest.section), as_json(section)
    found = [f"input {name}" for name in _changed_keys(manifest.inputs, dict(inputs))]
    found += [
        f"{name} (was {before.get(name)!r}, is {now.get(name)!r})" for name in _changed_keys(before, now)
    ]
    return found + [
        f"{DAMAGED_FILE} {name}"
        for name, entry in manifest.files.items()
        if not _is_as_listed(Path(folder) / name, entry)
    ]


def expire(folder: Path | str) -> None:
    """Make the next run repeat a finished stage: its manifest gets an input that no stage has."""
    manifest = read_manifest(folder)
    if manifest is not None:
        inputs = {"inputs": manifest.inputs | {"expired": datetime.now(UTC).isoformat()}}
        write_json_atomically(Path(folder) / MANIFEST_NAME, manifest.content() | inputs)


def rewrite_counts(folder: Path | str, counts: Mapping[str, Any]) -> None:
    """Replace the counts in the manifest of a finished stage. The manifest's hash stays."""
    manifest = read_manifest(folder)
    if manifest is not None:
        content = manifest.content() | {"counts": as_json(counts)}
        write_json_atomically(Path(folder) / MANIFEST_NAME, content)


def check_sizes(folder: Path | str, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise KieloError unless the files `names` of `folder` have the sizes in its manifest."""
    for name in names:
        path, listed = Path(folder) / name, manifest.files.get(name)
        if listed is None:
            raise KieloError(
                f"{path}: is not listed in {MANIFEST_NAME}, so the stage did not write it. Fix: move it away"
            )
        size = path.stat().st_size if path.is_file() else None
        if size != listed.bytes:
            found = "it is missing" if size is None else f"it has {size:,} bytes"
            raise KieloError(
                f"{path}: {found}, but the stage wrote {listed.bytes:,} bytes. Fix: put the file back, or "
                f"move {folder} away and run the stage again"
            )


def hash_file(path: Path | str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def hash_manifest(folder: Path | str) -> str:
    """Return the hash of a finished stage's kind, version, inputs, section and files, or raise KieloError."""
    content = finished_manifest(folder).content()
    return hash_json({key: content[key] for key in ("kind", "version", "inputs", "section", "files")})


def hash_json(content: Any) -> str:
    """Return the xxh3-128 of the content as canonical JSON (sorted keys), in hexadecimal."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


@contextmanager
def write_stage(
    folder: Path | str, kind: str, version: int, inputs: Hashes, section: Table
) -> Iterator[Stage]:
    """Write a whole stage folder or nothing: yield a `Stage` whose `folder` is aside.

    At a clean exit the folder takes its name, replacing an older one. At an exception nothing of it remains.
    KieloError for a full, read-only or lost disk, and, before any work, for files that no such stage wrote.
    """
    started = time.monotonic()
    made = StageFolder(folder, kind, hash_json([kind, version, dict(inputs), as_json(section)]))
    with disk_problems_reported(f"{folder}: the {kind} stage"):
        refuse_foreign(folder, kind)
        try:
            made.begin()
            stage = Stage(made.new)
            yield stage
            wall_seconds = time.monotonic() - started
            write_manifest(made.new, kind, version, inputs, section, stage.counts, wall_seconds)
            refuse_foreign(folder, kind)  # again: the work can have taken hours
            made.publish()
        except BaseException:
            made.discard()
            raise


def refuse_foreign(folder: Path | str, kind: str) -> None:
    """Raise KieloError for a file that a `kind` stage did not write, nor Kielo later (`is_own_text`)."""
    StageFolder(folder, kind, identity="").refuse()
    if (foreign := _foreign(Path(folder), kind)) is not None:
        raise KieloError(
            f"{folder}: contains {foreign}, which Kielo's {kind} stage did not write or which was changed "
            "since. The stage would replace it. Fix: move it away, or set `folder` in the recipe to another "
            "folder; nothing was changed"
        )


def write_manifest(
    folder: Path, kind: str, version: int, inputs: Hashes, section: Table, counts: Table, wall_seconds: float
) -> Manifest:
    bring_tree_to_disk(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST_NAME)
    files = {
        path.relative_to(folder).as_posix(): FileRecord(bytes=path.stat().st_size, xxh3_128=hash_file(path))
        for path in paths
    }
    manifest = Manifest.of_now(kind, version, inputs, section, counts, wall_seconds, files)
    write_json_atomically(folder / MANIFEST_NAME, manifest.content())
    return manifest


def write_json_atomically(path: Path | str, content: Any) -> None:
    """Write JSON aside, then rename: a reader sees the old or the new file, never a part."""
    write_text_atomically(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def write_text_atomically(path: Path | str, text: str) -> None:
    with DurableFile(path) as file:
        file.write(text.encode())


def as_json(content: Any) -> Any:
    """Return the content as JSON reads it back (tuples become lists), to compare it with a file."""
    return json.loads(json.dumps(content, ensure_ascii=False))


@cache
def installed_versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of the packages that decide an output, without an import of them."""
    versions = {"python": platform.python_version()}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _is_as_listed(path: Path, listed: FileRecord) -> bool:
    if not path.is_file() or path.stat().st_size != listed.bytes:
        return False
    return listed.bytes > HASHED_BYTES or listed.xxh3_128 is None or hash_file(path) == listed.xxh3_128


def _changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [key for key in {**before, **now} if before.get(key) != now.get(key)]


def _foreign(folder: Path, kind: str) -> str | None:
    if not folder.is_dir() or not (names := sorted(os.listdir(folder))):
        return None
    manifest = read_manifest(folder)
    if manifest is None:
        return names[0]
    if manifest.kind != kind:
        return f"{MANIFEST_NAME} of a {manifest.kind} stage"
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in sorted([*files, *links]):
            path = Path(place, name)
            relative = path.relative_to(folder).as_posix()
            is_known = relative in manifest.files or relative == MANIFEST_NAME or is_aside(name)
            if not is_known and not is_own_text(path):
                return relative
    return None
