"""The checkpoint folder on disk, without torch: its name, its `index.json`, and whether it is whole.

    checkpoints/step_00000100/
        rank_00000.safetensors ...   pieces of tensors, keys `NAME@offset,offset`
        index.json                   every tensor: dtype, shape, which piece lies where; and the plain JSON state
        manifest.json                size and checksums of each file above, and of itself; written last
    checkpoints/newest               a symbolic link, for people and scripts: readers choose by step and checksums

Every save has an id, which stands in each of its files: a file of another save is known as such. A file is
checked by blocks of 64 MiB, so that damage has a place. A folder without manifest is not a checkpoint.
Nothing here is ever pickled.
"""

import dataclasses
import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import xxhash

from kielo.artifact.manifest import (
    MANIFEST_NAME,
    READ_BYTES,
    Manifest,
    hash_json,
    installed_versions,
    write_text_atomically,
)
from kielo.artifact.run_format import migrated_identity
from kielo.recipe.errors import KieloError

INDEX_NAME = "index.json"
NEWEST_NAME = "newest"
VERSION = 2
BLOCK_BYTES = 64 * 2**20
_STEP_FOLDER = re.compile(r"step_(\d{8,})")
_RANK_FILE = re.compile(r"rank_(\d{5,})\.safetensors")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_OWN_DIGEST = "xxh3_128"  # the manifest's key for the digest of all its other content


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
    """`save_id`: the same in all files of one save. `aliases`: a tied tensor's name → the name it is stored
    under.
    """

    save_id: str
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


def _fault_of(name: str, error: OSError | UnicodeDecodeError) -> Fault:
    """Tell from an error while reading the file `name` what is wrong with its checkpoint."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return Fault("damaged", f"{name} is missing")
    if isinstance(error, UnicodeDecodeError):
        return Fault("damaged", f"{name} is not what was written ({error})")
    return Fault("unreadable", f"{name}: {_in_words(error)}; try again when the file system is back")


def _in_words(error: OSError) -> str:
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno, error.errno)})"


def _another_version(name: str, version: Any, written_by: str = "") -> Fault:
    return Fault(
        "of another version",
        f"{name} is of version {version}{written_by}, and this Kielo reads version {VERSION}; go on with "
        "the Kielo that wrote it",
    )


def chunk_key(name: str, offset: Iterable[int]) -> str:
    return f"{name}@{','.join(map(str, offset))}"


def parse_index(text: str, where: Path | str) -> CheckpointIndex:
    """Parse `index.json`, with the run's identity as this version stores it.

    Raises KieloError, naming the file, for anything but a sound index.
    """
    try:
        stored = json.loads(text)
        if stored["version"] != VERSION:
            raise FaultyCheckpoint(Path(where).parent, _another_version(INDEX_NAME, stored["version"]))
        tensors = {name: _entry(entry) for name, entry in stored["tensors"].items()}
        plain = stored["plain"]
        if "identity" in plain:
            plain = plain | {"identity": migrated_identity(plain["identity"], where)}
        index = CheckpointIndex(stored["save_id"], stored["step"], tensors, stored["aliases"], plain)
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
    """KieloError where there is none, FaultyCheckpoint where it cannot be read or is of another version."""
    path = Path(folder) / INDEX_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise KieloError(f"{folder} is not a checkpoint: {INDEX_NAME} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FaultyCheckpoint(folder, _fault_of(INDEX_NAME, error)) from error
    return parse_index(text, path)


def write_index(folder: Path, index: CheckpointIndex) -> dict[str, Any]:
    """Write `index.json` and bring it to the disk; returns its record for the manifest."""
    text = index.to_json().encode()
    with open(Path(folder) / INDEX_NAME, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    digests = BlockDigests()
    digests.update(text)
    return {"bytes": len(text), "xxh3_64_blocks": digests.hexdigests(), "save_id": index.save_id}


def write_checkpoint_manifest(
    folder: Path,
    index: CheckpointIndex,
    files: dict[str, dict[str, Any]],
    tensor_bytes: int,
    wall_seconds: float,
) -> None:
    """Write `manifest.json`, which makes the folder a checkpoint: call it when all `files` are on the disk.

    files: name → {"bytes", "xxh3_64_blocks", "save_id"}, the index among them.
    """
    manifest = Manifest(
        kind="checkpoint",
        version=VERSION,
        inputs={},
        section={},
        counts={"step": index.step, "tensor_bytes": tensor_bytes, "save_id": index.save_id},
        wall_seconds=round(wall_seconds, 3),
        versions=installed_versions(),
        files=files,
        written_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    content = dataclasses.asdict(manifest)
    write_text_atomically(
        Path(folder) / MANIFEST_NAME, _manifest_text(content | {_OWN_DIGEST: hash_json(content)})
    )


def _manifest_text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


class BlockDigests:
    """xxh3-64 of each `BLOCK_BYTES` of what passes, in hexadecimal; the last block may be shorter."""

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


def step_folder_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """100 for `.../step_00000100`; None for any other name (`.partial`, `.damaged`, ...)."""
    match = _STEP_FOLDER.fullmatch(Path(folder).name)
    return int(match[1]) if match else None


def rank_file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def rank_of(file_name: str) -> int | None:
    """The rank that wrote the file; None for files that rank 0 writes for all."""
    match = _RANK_FILE.fullmatch(file_name)
    return int(match[1]) if match else None


def step_folders(folder: Path) -> list[Path]:
    """The folders named as checkpoints inside `folder`, newest first; whether they are whole is not looked
    at.

    Raises KieloError where the file system does not say what is there: that is not an empty folder.
    """
    folder = Path(folder)
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if step_of(entry.name) is not None and entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise KieloError(f"{folder}: {_in_words(error)}; try again when the file system is back") from error
    return sorted((folder / name for name in names), key=step_of, reverse=True)


def read_checkpoint_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. FaultyCheckpoint where there is none, or one that is not as it was
    written.

    It must be of the step that the folder's name says, or a whole checkpoint could be taken for another.
    """
    folder = Path(folder)
    try:
        text = (folder / MANIFEST_NAME).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise FaultyCheckpoint(
            folder, Fault("damaged", f"{MANIFEST_NAME} is missing: the save did not finish")
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise FaultyCheckpoint(folder, _fault_of(MANIFEST_NAME, error)) from error
    fault = _manifest_fault(text)
    if fault is not None:
        raise FaultyCheckpoint(folder, fault)
    content = json.loads(text)
    del content[_OWN_DIGEST]
    manifest = Manifest(**content)
    step = step_of(folder.resolve())
    if step not in (None, manifest.counts["step"]):
        reason = (
            f"{MANIFEST_NAME} is the manifest of another checkpoint, that of step {manifest.counts['step']}"
        )
        raise FaultyCheckpoint(folder, Fault("damaged", reason))
    return manifest


def _manifest_fault(text: str) -> Fault | None:
    """Another version keeps its own digest as it likes; a version that the digest does not know is a flipped
    bit.
    """
    altered = Fault(
        "damaged",
        f"{MANIFEST_NAME} is not what was written (its own checksum differs), so nothing vouches for the "
        "files beside it",
    )
    try:
        content = json.loads(text)
        digest = content.pop(_OWN_DIGEST, None)
        kind, version = content["kind"], content["version"]
        is_ours = digest == hash_json(content | {"version": VERSION})
        if kind == "checkpoint" and isinstance(version, int) and version != VERSION and not is_ours:
            return _another_version(
                MANIFEST_NAME, version, f", written by kielo {content['versions']['kielo']}"
            )
        if version != VERSION or not is_ours or text != _manifest_text(content | {_OWN_DIGEST: digest}):
            return altered
        manifest = Manifest(**content)
    except (ValueError, KeyError, TypeError, AttributeError):
        return altered
    if manifest.kind != "checkpoint" or INDEX_NAME not in manifest.files:
        return Fault("damaged", f"{MANIFEST_NAME} is not that of a checkpoint but of a {manifest.kind}")
    return None


def listed_files(folder: Path) -> dict[str, dict[str, Any]]:
    """name → {"bytes", "xxh3_64_blocks", "save_id"} of the files that the manifest vouches for; raises as it
    does.
    """
    return read_checkpoint_manifest(folder).files


def find_fault(
    folder: Path, names: Iterable[str], files: dict[str, dict[str, Any]], checksums: bool = True
) -> Fault | None:
    """The first of `names` that is missing, cut short, altered, of another save or unreadable; None if all
    are sound.

    Without `checksums` only sizes and save ids are compared, which reads little.
    """
    for name in names:
        if name not in files:
            return Fault("damaged", f"{name} is not listed in {MANIFEST_NAME}")
        try:
            damage = _file_damage(Path(folder) / name, files[name], checksums)
        except OSError as error:
            return _fault_of(name, error)
        if damage is not None:
            return Fault("damaged", f"{name} {damage}")
    return None


def _file_damage(path: Path, expected: dict[str, Any], checksums: bool) -> str | None:
    size, save_id = path.stat().st_size, _save_id_inside(path)
    damage = None
    if size != expected["bytes"]:
        damage = f"is {size} bytes long instead of {expected['bytes']}"
    elif checksums:
        block = _first_wrong_block(path, expected["xxh3_64_blocks"])
        if block is not None:
            start, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, size)
            damage = f"is not what was written: block {block} (bytes {start:,} to {end - 1:,}) has another checksum"
    if save_id == expected["save_id"]:
        return damage
    if save_id is None:
        return damage or "does not say of which save it is"
    stale = f"is of another save ({save_id} instead of {expected['save_id']})"
    return f"{stale}, and {damage}" if damage else stale


def _first_wrong_block(path: Path, expected: list[str]) -> int | None:
    digests = BlockDigests()
    with open(path, "rb") as file:
        while piece := file.read(READ_BYTES):
            digests.update(piece)
    pairs = zip_longest(digests.hexdigests(), expected)
    return next((block for block, (found, written) in enumerate(pairs) if found != written), None)


def _save_id_inside(path: Path) -> str | None:
    """What a file says of itself: the index in its JSON, a safetensors file in its header; None where it is
    unreadable.
    """
    try:
        if path.name == INDEX_NAME:
            return json.loads(path.read_bytes())["save_id"]
        with open(path, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > _MAX_HEADER_BYTES:
                return None
            return json.loads(file.read(header_bytes))["__metadata__"]["save_id"]
    except (ValueError, KeyError, TypeError):
        return None


def check_checkpoint(folder: Path, checksums: bool = True) -> Fault | None:
    """What is wrong with one checkpoint folder, naming the file; None if it is whole."""
    try:
        files = listed_files(folder)
    except FaultyCheckpoint as error:
        return error.fault
    return find_fault(folder, sorted(files), files, checksums)


def list_checkpoints(folder: Path, checksums: bool = False) -> list[dict[str, Any]]:
    """The checkpoints in `folder`, newest first, as rows {"name", "step", "tokens", "loss", "bytes",
    "written_at", "state"}.

    state: "verified" (every byte was read and compared), "complete" (without `checksums`: sizes and save ids
    only), or a fault: "damaged: …", "unreadable: …", "of another version: …". tokens, loss, written_at and
    bytes are None where the checkpoint does not say them or cannot be read.
    """
    rows = []
    for path in step_folders(folder):
        with suppress(FileNotFoundError):  # pruned by the training job while we look
            rows.append(_row(path, checksums))
    return rows


def _row(path: Path, checksums: bool) -> dict[str, Any]:
    fault = check_checkpoint(path, checksums)
    plain: dict[str, Any] = {}
    written_at = None
    with suppress(KieloError):
        written_at = read_checkpoint_manifest(path).written_at
        plain = read_index(path).plain
    return {
        "name": path.name,
        "step": step_of(path),
        "tokens": plain.get("tokens"),
        "loss": plain.get("loss"),
        "bytes": _folder_bytes(path),
        "written_at": written_at,
        "state": str(fault) if fault else "verified" if checksums else "complete",
    }


def _folder_bytes(path: Path) -> int | None:
    try:
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    except FileNotFoundError:
        raise
    except OSError:
        return None


def newest_complete(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint in `folder`, and a warning for each newer one that is damaged. Changes
    nothing.

    Raises FaultyCheckpoint for a newer one that is unreadable or of another version: it may well be whole.
    """
    warnings = []
    for path in step_folders(folder):
        fault = check_checkpoint(path)
        if fault is None:
            return path, warnings
        if fault.kind != "damaged":
            raise FaultyCheckpoint(path, fault)
        warnings.append(f"checkpoint {path} is {fault}")
    return None, warnings


def newest_checkpoint(run_folder: Path, warn: Callable[[str], object] | None = None) -> Path:
    """The newest whole checkpoint of a run; `warn` is told of each newer one that is damaged.

    Raises KieloError if there is none, and as `newest_complete` does.
    """
    folder = Path(run_folder) / "train" / "checkpoints"
    path, warnings = newest_complete(folder)
    for warning in warnings if warn else ():
        warn(warning)
    if path is None:
        damaged = f" ({'; '.join(warnings)})" if warnings else ""
        raise KieloError(f"{folder} holds no whole checkpoint{damaged}; run the train stage first")
    return path
