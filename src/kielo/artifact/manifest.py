"""The manifest: the file that says a stage's folder is finished, and from what it was made.

A stage writes into `NAME.partial`; at the end every file is hashed, `manifest.json` is written last, and the
folder is renamed to `NAME`. So a folder with a manifest is complete, and one without is not finished.
Inputs by hash + recipe section -> folder with files and manifest.json.
"""

import errno
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from kielo.recipe.errors import KieloError

MANIFEST_NAME = "manifest.json"
READ_BYTES = 1 << 20
PACKAGES = ("kielo", "numpy", "tokenizers", "torch", "transformers", "datatrove")


@dataclass(frozen=True)
class Manifest:
    """What a finished stage folder says about itself.

    `inputs` maps a name to a hash, `section` is what the recipe said (JSON), `counts` holds the stage's
    figures, `files` maps a path relative to the folder to {"bytes", "xxh3_128"}.
    """

    kind: str
    version: int
    inputs: dict[str, str]
    section: dict[str, Any]
    counts: dict[str, Any]
    wall_seconds: float
    versions: dict[str, str]
    files: dict[str, dict[str, Any]]
    written_at: str


@dataclass
class Stage:
    """A stage in the making: write files under `folder`, fill `counts`."""

    folder: Path
    counts: dict[str, Any] = field(default_factory=dict)


def read_manifest(folder: Path | str) -> Manifest | None:
    """The folder's manifest; None when there is none (the stage is not finished).

    Raises KieloError when there is one that cannot be understood.
    """
    path = Path(folder) / MANIFEST_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Manifest(**{entry.name: content[entry.name] for entry in fields(Manifest)})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as problem:
        raise KieloError(
            f"{path}: not a readable manifest ({type(problem).__name__}: {problem}); "
            f"delete {path.parent} and run the stage again"
        ) from None


def is_current(
    folder: Path | str, kind: str, version: int, inputs: Mapping[str, str], section: Mapping[str, Any]
) -> bool:
    """Whether `folder` already holds what these inputs and this section would make again.

    Files are compared by presence and size only; reading terabytes to decide that nothing is to do would be
    worse.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    asked = (kind, version, dict(inputs), as_json(section))
    if asked != (manifest.kind, manifest.version, manifest.inputs, manifest.section):
        return False
    return all(_has_size(Path(folder) / name, entry["bytes"]) for name, entry in manifest.files.items())


def hash_file(path: Path | str) -> str:
    """xxh3-128 of the file's bytes, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def hash_manifest(folder: Path | str) -> str:
    """Hash of what identifies a finished stage's output: kind, version, inputs, section and files.

    Seconds, dates and library versions are left out, so the same output made twice has one hash.
    Raises KieloError when the stage is not finished.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise KieloError(f"{folder}: no {MANIFEST_NAME}, so this stage is not finished; run it first")
    return hash_json(
        {
            "kind": manifest.kind,
            "version": manifest.version,
            "inputs": manifest.inputs,
            "section": manifest.section,
            "files": manifest.files,
        }
    )


def hash_json(content: Any) -> str:
    """xxh3-128 of the content as canonical JSON (sorted keys), in hexadecimal."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


@contextmanager
def write_stage(
    folder: Path | str, kind: str, version: int, inputs: Mapping[str, str], section: Mapping[str, Any]
) -> Iterator[Stage]:
    """Write a whole stage folder or nothing.

    Yields a `Stage` whose `folder` is `NAME.partial`. At a clean exit the files are hashed, the manifest is
    written and the folder takes its name, replacing an older one. At an exception the partial folder is
    removed and `folder` stays as it was. A full disk becomes a KieloError.
    """
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    started = time.monotonic()
    _remove(partial)
    try:
        partial.mkdir(parents=True)
        stage = Stage(partial)
        yield stage
        wall_seconds = time.monotonic() - started
        write_manifest(partial, kind, version, inputs, section, stage.counts, wall_seconds)
        _replace_folder(partial, folder)
    except BaseException as problem:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise KieloError(
                f"{folder}: no space left while writing the {kind} stage; nothing was changed there. "
                "Free some space, or set `folder` in the recipe to a larger disk"
            ) from problem
        raise


def write_manifest(
    folder: Path | str,
    kind: str,
    version: int,
    inputs: Mapping[str, str],
    section: Mapping[str, Any],
    counts: Mapping[str, Any],
    wall_seconds: float,
) -> Manifest:
    """Hash the files under `folder` and write its manifest: for a stage that fills its folder in place."""
    folder = Path(folder)
    manifest = Manifest(
        kind=kind,
        version=version,
        inputs=dict(inputs),
        section=as_json(section),
        counts=as_json(counts),
        wall_seconds=round(wall_seconds, 3),
        versions=installed_versions(),
        files=_describe_files(folder),
        written_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_json_atomically(folder / MANIFEST_NAME, asdict(manifest))
    return manifest


def read_json_object(path: Path | str) -> dict[str, Any]:
    """The object in a JSON file of a run. KieloError naming the file for anything else; FileNotFoundError where there is none."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise KieloError(f"{path}: not valid JSON ({problem}); delete its folder and run the stage again") from None
    if not isinstance(content, dict):
        raise KieloError(f"{path}: holds {str(content)[:40]!r} and no JSON object; delete its folder and run the stage again")
    return content


def write_json_atomically(path: Path | str, content: Any) -> None:
    """Write JSON aside, then rename: a reader sees the old file or the new one, never a part."""
    write_text_atomically(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def write_text_atomically(path: Path | str, text: str) -> None:
    """Write UTF-8 text aside, then rename: a reader sees the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The process number keeps two ranks or jobs that write the same file from sharing one temporary file.
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(aside, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def as_json(content: Any) -> Any:
    """The content as it reads back from JSON (tuples become lists), so that comparisons with a file hold."""
    return json.loads(json.dumps(content, ensure_ascii=False))


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide an output, those that are installed; imports
    none."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST_NAME)
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "xxh3_128": hash_file(path)}
        for path in paths
    }


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _replace_folder(partial: Path, folder: Path) -> None:
    old = folder.with_name(folder.name + ".old")
    _remove(old)
    if folder.exists():
        os.replace(folder, old)
    os.replace(partial, folder)
    _remove(old)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
