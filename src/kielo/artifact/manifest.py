"""The manifest: the file that says that a stage's folder is finished, and from what it was made.

A stage writes into a folder aside (`stage_folder.py`); at the end every file is hashed and brought to the
disk, `manifest.json` is written last, and the folder takes its name. So a folder with a manifest is complete,
and one without is not finished. A file that no manifest lists is not Kielo's: a stage never replaces it.
Inputs by hash + recipe section → folder with files and manifest.json.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import xxhash
from pydantic import ValidationError

from kielo.artifact.durable import DurableFile, bring_tree_to_disk, disk_problems_reported, is_aside
from kielo.artifact.json_object import JsonObject, JsonTable, first_wrong
from kielo.artifact.own_text import is_own_text
from kielo.artifact.stage_folder import StageFolder
from kielo.recipe.errors import KieloError

MANIFEST_NAME = "manifest.json"
READ_BYTES = 1 << 20
DAMAGED_FILE = "file"  # beginning of such a difference
# Files up to this size are hashed, not only measured, to decide whether a stage is current.
HASHED_BYTES = 1 << 20
PACKAGES = ("kielo", "numpy", "tokenizers", "torch", "transformers")


class FileRecord(JsonObject):
    """A file of a finished stage."""

    bytes: int
    """Its size."""
    xxh3_128: str | None = None
    """Its checksum, in hexadecimal; null: the manifest has another one of it, as those of checkpoints."""


class Manifest(JsonObject):
    """The content of `manifest.json`."""

    kind: str
    """The stage."""
    version: int
    """Version of what the stage writes."""
    inputs: dict[str, str]
    """Input → its hash."""
    section: JsonTable
    """The section of the recipe."""
    counts: JsonTable
    """The stage's figures; their types are in `stage_counts.py`."""
    wall_seconds: float
    """Seconds of the work."""
    versions: dict[str, str]
    """Versions of Python and of the packages that decide an output."""
    files: Mapping[str, FileRecord]
    """Path, relative to the folder → the file."""
    written_at: str
    """Date and time in UTC, ISO 8601, to the second."""

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
        """Return a manifest that is written now, by the packages that are installed."""
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
    """A stage in the making: write files under `folder`, fill `counts`."""

    folder: Path
    counts: JsonTable = field(default_factory=dict)


def read_manifest(folder: Path | str) -> Manifest | None:
    """Return the folder's manifest; None when there is none (the stage is not finished).

    Raises KieloError, naming the first wrong key, when there is one that cannot be understood.
    """
    path = Path(folder) / MANIFEST_NAME
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise KieloError(f"{path}: cannot be read ({problem.strerror})") from problem
    except ValidationError as problem:
        raise KieloError(
            f"{path}: not a readable manifest of Kielo's ({first_wrong(problem)}); move {path.parent} away, "
            "and the stage makes it again"
        ) from None


def finished_manifest(folder: Path | str) -> Manifest:
    """Return the folder's manifest. Raises KieloError when the stage is not finished."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise KieloError(f"{folder}: no {MANIFEST_NAME}, so this stage is not finished; run it first")
    return manifest


def is_current(
    folder: Path | str,
    kind: str,
    version: int,
    inputs: Mapping[str, str],
    section: Mapping[str, Any],
    migrate: Callable[[JsonTable], JsonTable] = dict,
) -> bool:
    """Return True if `folder` already holds what these inputs and this section would make again.

    migrate: the section of a manifest of any version of its format → that of this version. Small files are
    compared by hash, larger ones by size only: reading terabytes to decide that nothing is to do would be
    worse.
    """
    is_finished = read_manifest(folder) is not None
    return is_finished and not differences(folder, kind, version, inputs, section, migrate)


def differences(
    folder: Path | str,
    kind: str,
    version: int,
    inputs: Mapping[str, str],
    section: Mapping[str, Any],
    migrate: Callable[[JsonTable], JsonTable] = dict,
) -> list[str]:
    """Return the differences of the finished stage in `folder` from what these inputs and this section make.

    Sentences for people; none when it is current, or when there is no finished stage. A difference of a file
    that is not as listed begins with DAMAGED_FILE.
    """
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
    """Have the next run make a finished stage again: its manifest gets an input that no stage has.

    Its files stay until then. Does nothing where no stage is finished.
    """
    manifest = read_manifest(folder)
    if manifest is not None:
        inputs = manifest.inputs | {"expired": datetime.now(UTC).isoformat()}
        _rewrite(folder, manifest, {"inputs": inputs})


def rewrite_counts(folder: Path | str, counts: Mapping[str, Any]) -> None:
    """Replace the counts in the manifest of a finished stage; its hash does not depend on them."""
    manifest = read_manifest(folder)
    if manifest is not None:
        _rewrite(folder, manifest, {"counts": as_json(counts)})


def _rewrite(folder: Path | str, manifest: Manifest, changes: JsonTable) -> None:
    write_json_atomically(Path(folder) / MANIFEST_NAME, manifest.content() | changes)


def check_sizes(folder: Path | str, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise KieloError unless the files `names` of `folder` have the sizes that its manifest lists."""
    for name in names:
        path, listed = Path(folder) / name, manifest.files.get(name)
        if listed is None:
            raise KieloError(
                f"{path}: is not listed in {MANIFEST_NAME}, so the stage did not write it; move it away"
            )
        size = path.stat().st_size if path.is_file() else None
        if size != listed.bytes:
            found = "it is missing" if size is None else f"it has {size:,} bytes"
            raise KieloError(
                f"{path}: {found}, and the stage wrote {listed.bytes:,}; put the file back, or move "
                f"{folder} away and run the stage again"
            )


def hash_file(path: Path | str) -> str:
    """Return the xxh3-128 of the file's bytes, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def hash_manifest(folder: Path | str) -> str:
    """Return the hash that identifies a finished stage's output: kind, version, inputs, section and files.

    Seconds, dates and library versions are left out, so the same output made twice has one hash.
    Raises KieloError when the stage is not finished.
    """
    content = finished_manifest(folder).content()
    return hash_json({key: content[key] for key in ("kind", "version", "inputs", "section", "files")})


def hash_json(content: Any) -> str:
    """Return the xxh3-128 of the content as canonical JSON (sorted keys), in hexadecimal."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


@contextmanager
def write_stage(
    folder: Path | str, kind: str, version: int, inputs: Mapping[str, str], section: Mapping[str, Any]
) -> Iterator[Stage]:
    """Write a whole stage folder or nothing.

    Yields a `Stage` whose `folder` is aside. At a clean exit the files are hashed and brought to the disk,
    the manifest is written and the folder takes its name, replacing an older one. At an exception nothing of
    it is left, and `folder` stays as it was. A disk that is full, read-only or gone becomes a KieloError, and
    so does, before anything is done, a `folder` that holds what this stage did not write.
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
            refuse_foreign(folder, kind)  # again: the work may have taken hours
            made.publish()
        except BaseException:
            made.discard()
            raise


def refuse_foreign(folder: Path | str, kind: str) -> None:
    """Raise KieloError, naming a file, where `folder` holds anything that a `kind` stage did not write.

    A stage would replace it. Also where no stage folder can be. Call it before a stage begins its work.

    What Kielo adds to a finished folder bears its mark (`own_text.py`).
    """
    StageFolder(folder, kind, identity="").refuse()
    foreign = _foreign(Path(folder), kind)
    if foreign is not None:
        raise KieloError(
            f"{folder}: holds {foreign}, which Kielo's {kind} stage did not write or which was changed "
            "since, and would replace with the whole folder. Move it away, or set `folder` in the recipe "
            "to another one; nothing was changed"
        )


def write_manifest(
    folder: Path | str,
    kind: str,
    version: int,
    inputs: Mapping[str, str],
    section: Mapping[str, Any],
    counts: Mapping[str, Any],
    wall_seconds: float,
) -> Manifest:
    """Bring the files under `folder` to the disk, hash them, and write the manifest that vouches for them."""
    folder = Path(folder)
    bring_tree_to_disk(folder)
    files = _describe_files(folder)
    manifest = Manifest.of_now(kind, version, inputs, section, counts, wall_seconds, files)
    write_json_atomically(folder / MANIFEST_NAME, manifest.content())
    return manifest


def write_json_atomically(path: Path | str, content: Any) -> None:
    """Write JSON aside, then rename: a reader sees the old file or the new one, never a part."""
    write_text_atomically(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def write_text_atomically(path: Path | str, text: str) -> None:
    """Write UTF-8 text aside, then rename: a reader sees the old file or the new one, never a part."""
    with DurableFile(path) as file:
        file.write(text.encode())


def as_json(content: Any) -> Any:
    """Return the content as it reads back from JSON (tuples become lists), for comparison with a file."""
    return json.loads(json.dumps(content, ensure_ascii=False))


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of those packages that decide an output. Imports none of them."""
    return dict(_installed_versions())


@cache
def _installed_versions() -> dict[str, str]:
    """Read each package's metadata once a process: every checkpoint and stage writes the versions down."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _describe_files(folder: Path) -> dict[str, FileRecord]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST_NAME)
    return {
        path.relative_to(folder).as_posix(): FileRecord(bytes=path.stat().st_size, xxh3_128=hash_file(path))
        for path in paths
    }


def _is_as_listed(path: Path, listed: FileRecord) -> bool:
    if not path.is_file() or path.stat().st_size != listed.bytes:
        return False
    return listed.bytes > HASHED_BYTES or listed.xxh3_128 is None or hash_file(path) == listed.xxh3_128


def _changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [key for key in {**before, **now} if before.get(key) != now.get(key)]


def _foreign(folder: Path, kind: str) -> str | None:
    """Return the first file in `folder`, relative to it, that a `kind` stage did not write, if any."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    if not names:
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
