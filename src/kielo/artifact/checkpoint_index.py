"""The index and the manifest of a checkpoint.

`index.json`: dtype, shape and chunks of every tensor, and the plain state.
"""

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pydantic import ConfigDict

from kielo.artifact.checkpoint_folder import (
    INDEX_NAME,
    VERSION,
    BlockDigests,
    CheckpointFile,
    Fault,
    FaultyCheckpoint,
    Files,
    another_version,
    fault_of_reading,
    index_text,
    read_entries,
    read_head,
    step_of,
)
from kielo.artifact.json_object import JsonObject, JsonTable, checked
from kielo.artifact.manifest import MANIFEST_NAME, Manifest, hash_json, write_text_atomically
from kielo.artifact.run_format import migrated_identity
from kielo.artifact.stage_counts import CheckpointCounts
from kielo.recipe.errors import KieloError


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: `shape` elements from `offset`, stored under `key` of `file`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor, whose chunks cover `shape` without overlap. dtype: a safetensors name ("F32", "BF16")."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class SourceCheckpoint(JsonObject):
    name: str
    step: int
    save_id: str


class PlainState(JsonObject):
    """The JSON state beside the tensors (`train/state.py`). Some versions lack keys with defaults."""

    step: int | None = None
    tokens: int | None = None  # since step 1
    samples: int | None = None  # sequences since step 1
    skipped_steps: list[list[int]] = []
    precisions: list[list[int | str]] = []
    refused_changes: list[int] = []
    watch: JsonTable | None = None
    trouble: JsonTable | None = None
    spikes: list[JsonTable] = []
    trained: list[list[int | list[str]]] = []
    loss: float | None = None  # of the step; null: the step was skipped, or no label counted
    optimiser_updates: int | None = None
    guard: JsonTable | None = None
    spike_watch: JsonTable | None = None
    identity: JsonTable = {}  # with the format's version (`run_format.py`)
    source_tensors: dict[str, str] = {}  # name → dtype of the tensors that gave the run's first weights
    source_settings: JsonTable | None = None  # of generation, of those weights (`source_settings.py`)
    tokenizer_hash: str | None = None
    averaged_from: list[SourceCheckpoint] = []  # early checkpoints first


@dataclass(frozen=True)
class CheckpointIndex:
    """The tensors and the plain state of a save."""

    save_id: str  # which all files of the save have
    step: int
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str] = field(default_factory=dict)  # a tied tensor's name → the stored tensor's
    plain: PlainState = field(default_factory=PlainState)
    unread: tuple[str, ...] = ()  # names of tensors in the file that were not asked for

    def names(self) -> list[str]:
        return [*self.tensors, *self.unread, *self.aliases]

    def holds(self, name: str) -> bool:
        return self.aliases.get(name, name) in self.tensors

    def entry(self, name: str) -> TensorEntry:
        return self.tensors[self.aliases.get(name, name)]


def chunk_key(name: str, offset: Iterable[int]) -> str:
    return f"{name}@{','.join(map(str, offset))}"


def entry_json(entry: TensorEntry) -> str:
    chunks = [vars(chunk) for chunk in entry.chunks]
    return json.dumps({"dtype": entry.dtype, "shape": entry.shape, "chunks": chunks})


def read_index(folder: Path, names: Collection[str] | None = None) -> CheckpointIndex:
    """Read the index of the checkpoint `folder`, with the run's identity in this version's form.

    `names` are the tensors whose entries are parsed, None for all. Raise KieloError if the file is missing or
    not a sound index, FaultyCheckpoint if it is unreadable or of another version.
    """
    path = Path(folder) / INDEX_NAME
    try:
        with open(path, "rb") as file:
            index = _parsed(path, file, names)
    except (FileNotFoundError, NotADirectoryError):
        raise KieloError(f"{folder} is not a checkpoint: {INDEX_NAME} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FaultyCheckpoint(folder, fault_of_reading(INDEX_NAME, error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KieloError(f"{path}: not a checkpoint index ({error!r})") from error
    for name, entry in index.tensors.items():
        if sum(math.prod(chunk.shape) for chunk in entry.chunks) != math.prod(entry.shape):
            raise KieloError(f"{path}: the chunks of {name} do not make up its shape {list(entry.shape)}")
    held = {*index.tensors, *index.unread}
    for alias, name in index.aliases.items():
        if name not in held:
            raise KieloError(f"{path}: {alias} is tied to {name}, which does not exist")
    return index


def read_state(folder: Path) -> PlainState:
    return read_index(folder, names=()).plain


def read_plain(folder: Path) -> JsonTable:
    return read_state(folder).content()


def write_index(folder: Path, index: CheckpointIndex, entries: Mapping[str, str]) -> CheckpointFile:
    """Write `index.json` to the disk. Return its manifest record. entries: tensor → its `entry_json`."""
    head = {
        "version": VERSION,
        "save_id": index.save_id,
        "step": index.step,
        "aliases": index.aliases,
        "plain": index.plain.content(),
    }
    digests, num_bytes = BlockDigests(), 0
    with open(Path(folder) / INDEX_NAME, "wb") as file:
        for part in index_text(head, entries):
            file.write(part)
            digests.update(part)
            num_bytes += len(part)
        file.flush()
        os.fsync(file.fileno())
    return CheckpointFile(bytes=num_bytes, xxh3_64_blocks=digests.hexdigests(), save_id=index.save_id)


def _parsed(path: Path, file: BinaryIO, names: Collection[str] | None) -> CheckpointIndex:
    stored = read_head(file)
    if stored["version"] != VERSION:
        raise FaultyCheckpoint(path.parent, another_version(INDEX_NAME, stored["version"]))
    plain, aliases = stored["plain"], stored["aliases"]
    if "identity" in plain:
        plain = plain | {"identity": migrated_identity(plain["identity"], path)}
    held = stored["tensors"] if "tensors" in stored else stored["lines"]
    wanted = set(held) if names is None else {aliases.get(name, name) for name in names}
    in_head = {name: entry for name, entry in stored.get("tensors", {}).items() if name in wanted}
    entries = in_head if "tensors" in stored else read_entries(file, held, wanted)
    tensors = {name: _entry(entry) for name, entry in entries.items()}
    unread = tuple(name for name in held if name not in tensors)
    state = checked(path, PlainState, plain, inside="plain.")
    return CheckpointIndex(stored["save_id"], stored["step"], tensors, aliases, state, unread)


def _entry(stored: JsonTable) -> TensorEntry:
    chunks = tuple(
        Chunk(tuple(chunk["offset"]), tuple(chunk["shape"]), chunk["file"], chunk["key"])
        for chunk in stored["chunks"]
    )
    return TensorEntry(stored["dtype"], tuple(stored["shape"]), chunks)


_OWN_DIGEST = "xxh3_128"  # key of the digest of the manifest's other content


class CheckpointManifest(Manifest):
    """The manifest of a checkpoint, written last. A digest covers all keys, so no others are allowed."""

    model_config = ConfigDict(extra="forbid")

    files: Mapping[str, CheckpointFile]

    @property
    def saved(self) -> CheckpointCounts:
        return CheckpointCounts.model_validate(self.counts)


def write_checkpoint_manifest(
    folder: Path, index: CheckpointIndex, files: Files, tensor_bytes: int, wall_seconds: float
) -> None:
    """Write `manifest.json`, which makes the folder a checkpoint, when all `files` are on the disk."""
    saved = CheckpointCounts(step=index.step, tensor_bytes=tensor_bytes, save_id=index.save_id)
    manifest = CheckpointManifest.of_now("checkpoint", VERSION, {}, {}, saved.content(), wall_seconds, files)
    content = manifest.content()
    text = _manifest_text(content | {_OWN_DIGEST: hash_json(content)})
    write_text_atomically(Path(folder) / MANIFEST_NAME, text)


def read_checkpoint_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint. FaultyCheckpoint if it is missing, altered or of another step."""
    folder = Path(folder)
    try:
        text = (folder / MANIFEST_NAME).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        fault = Fault("damaged", f"{MANIFEST_NAME} is missing: the save did not finish")
        raise FaultyCheckpoint(folder, fault) from None
    except (OSError, UnicodeDecodeError) as error:
        raise FaultyCheckpoint(folder, fault_of_reading(MANIFEST_NAME, error)) from error
    if isinstance(manifest := _manifest_or_fault(text), Fault):
        raise FaultyCheckpoint(folder, manifest)
    saved = manifest.saved.step
    if step_of(folder.resolve()) not in (None, saved):
        reason = f"{MANIFEST_NAME} is the manifest of another checkpoint, of step {saved}"
        raise FaultyCheckpoint(folder, Fault("damaged", reason))
    return manifest


def listed_files(folder: Path) -> Mapping[str, CheckpointFile]:
    return read_checkpoint_manifest(folder).files


def _manifest_or_fault(text: str) -> CheckpointManifest | Fault:
    """Return the manifest, or its fault. Another version, unlike a flipped bit, may have another digest."""
    reason = "differs from what was written (its own checksum differs), so no file beside it can be checked"
    altered = Fault("damaged", f"{MANIFEST_NAME} {reason}")
    try:
        content = json.loads(text)
        digest = content.pop(_OWN_DIGEST, None)
        kind, version = content["kind"], content["version"]
        is_ours = digest == hash_json(content | {"version": VERSION})
        if kind == "checkpoint" and isinstance(version, int) and version != VERSION and not is_ours:
            writer = f", written by kielo {content['versions']['kielo']}"
            return another_version(MANIFEST_NAME, version, writer)
        if version != VERSION or not is_ours or text != _manifest_text(content | {_OWN_DIGEST: digest}):
            return altered
        if kind != "checkpoint" or INDEX_NAME not in content["files"]:
            return Fault("damaged", f"{MANIFEST_NAME} is the manifest of a {kind}, not of a checkpoint")
        manifest = CheckpointManifest.model_validate(content)
        CheckpointCounts.model_validate(manifest.counts)
    except (ValueError, KeyError, TypeError, AttributeError):
        return altered
    return manifest


def _manifest_text(content: JsonTable) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
