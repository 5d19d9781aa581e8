"""The index of a checkpoint, `index.json`: dtype, shape and chunks of every tensor, and the plain state."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kielo.artifact.block_digests import BlockDigests
from kielo.artifact.checkpoint_faults import FaultyCheckpoint, another_version, fault_of_reading
from kielo.artifact.checkpoint_folder import INDEX_NAME, VERSION
from kielo.artifact.run_format import migrated_identity
from kielo.recipe.errors import KieloError


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: `shape` elements from `offset`, stored whole under `key` of `file`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True)
class TensorEntry:
    """One tensor, whose chunks cover `shape` without overlap. dtype: a safetensors name ("F32", "BF16")."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class CheckpointIndex:
    """The tensors and the plain state of one save.

    save_id: the same in all files of the save. aliases: a tied tensor's name → the name it is stored under.
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


def chunk_key(name: str, offset: Iterable[int]) -> str:
    return f"{name}@{','.join(map(str, offset))}"


def parse_index(text: str, where: Path | str) -> CheckpointIndex:
    """Parses the text of an `index.json`, with the run's identity as this version stores it.

    Raises KieloError, naming the file, for anything but a sound index.
    """
    try:
        stored = json.loads(text)
        if stored["version"] != VERSION:
            raise FaultyCheckpoint(Path(where).parent, another_version(INDEX_NAME, stored["version"]))
        tensors = {name: _entry(entry) for name, entry in stored["tensors"].items()}
        plain = stored["plain"]
        if "identity" in plain:
            plain = plain | {"identity": migrated_identity(plain["identity"], where)}
        index = CheckpointIndex(stored["save_id"], stored["step"], tensors, stored["aliases"], plain)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KieloError(f"{where}: not a checkpoint index ({error!r})") from error
    for name, entry in index.tensors.items():
        if sum(math.prod(chunk.shape) for chunk in entry.chunks) != math.prod(entry.shape):
            raise KieloError(f"{where}: the chunks of {name} do not make up its shape {list(entry.shape)}")
    for alias, name in index.aliases.items():
        if name not in index.tensors:
            raise KieloError(f"{where}: {alias} is tied to {name}, which is not there")
    return index


def read_index(folder: Path) -> CheckpointIndex:
    """Reads the index of the checkpoint `folder`.

    Raises KieloError if it is missing, FaultyCheckpoint if it cannot be read or is of another version.
    """
    path = Path(folder) / INDEX_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise KieloError(f"{folder} is not a checkpoint: {INDEX_NAME} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FaultyCheckpoint(folder, fault_of_reading(INDEX_NAME, error)) from error
    return parse_index(text, path)


def write_index(folder: Path, index: CheckpointIndex) -> dict[str, Any]:
    """Writes `index.json` and brings it to the disk; returns its record for the manifest."""
    text = index.to_json().encode()
    with open(Path(folder) / INDEX_NAME, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    digests = BlockDigests()
    digests.update(text)
    return {"bytes": len(text), "xxh3_64_blocks": digests.hexdigests(), "save_id": index.save_id}


def _entry(stored: dict[str, Any]) -> TensorEntry:
    chunks = tuple(
        Chunk(tuple(chunk["offset"]), tuple(chunk["shape"]), chunk["file"], chunk["key"])
        for chunk in stored["chunks"]
    )
    return TensorEntry(stored["dtype"], tuple(stored["shape"]), chunks)
