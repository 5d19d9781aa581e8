"""Checks token files against the checksums in their manifest, in a thread while the model is built.

Files that an earlier attempt found sound, and whose size, times and inode are unchanged, are not read again:
`train/tokens_verified.json` lists them, so that a requeued job reads nothing. The ranks share the files.

A damaged file is refused, but for damage that a run in progress would have left out
(`train.max_left_out_sequences`): where the run has trained, tokens may be cut, missing or unreadable, or have
ids outside of the vocabulary. Then the sequences that need what is lost are left out as they are read.
"""

import json
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import xxhash

from kielo.artifact.manifest import (
    READ_BYTES,
    Manifest,
    check_sizes,
    hash_file,
    hash_manifest,
    write_json_atomically,
)
from kielo.artifact.token_shards import LOSS_MASK, TokenShard
from kielo.artifact.token_sources import is_cut
from kielo.artifact.trained_text import has_trained
from kielo.checkpoint.agreement import Agreement
from kielo.dataset.batches import open_shard, packed_manifest
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Resolved

RECORD_NAME = "tokens_verified.json"
SUFFIXES = (".bin", ".idx", LOSS_MASK)
# between two collectives: one that waited while terabytes are read would time out
WAIT_SECONDS = 10.0


@dataclass
class _Found:
    """The findings of one rank. refusal: what is wrong with the first file that ends the attempt, or None.

    damaged: file → what is wrong with it, of those whose damage is left out.
    """

    refusal: str | None = None
    damaged: dict[str, str] = field(default_factory=dict)


class TokenCheck:
    """Verifies the files of the tokens folder. All ranks make it, `finish` it and leave it together.

    ranks: used by the calling thread only. Raises KieloError on every rank for a file of another size than
    listed, unless its damage may be left out, and for a folder that was replaced after the run was resolved.
    """

    def __init__(self, resolved: Resolved, ranks: Agreement):
        placement = resolved.placement
        self._folder, self._ranks = Path(placement.tokens_folder), ranks
        self._tokens_hash = resolved.identity.tokens_hash
        self._vocab_rows = resolved.identity.model.vocab_rows
        self._record_path = Path(placement.train_folder) / RECORD_NAME
        self._leaves_out = placement.train.max_left_out_sequences > 0
        self._stopped = Event()
        self._listed, self._unread, self._tolerated, self._cut = ranks.on_first(self._look)
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokens")
        self._reading: Future[_Found] = self._reader.submit(
            self._read, self._unread[ranks.rank :: ranks.size]
        )

    def __enter__(self) -> "TokenCheck":
        return self

    def __exit__(self, *problem: object) -> None:
        self._stopped.set()
        self._reader.shutdown()

    def finish(self) -> list[str]:
        """Waits until every rank has read its share; returns a sentence for each file of damage to leave out.

        Raises KieloError on every rank for a changed file.
        """
        while not all(self._ranks.gather(self._is_read())):
            pass
        found = self._reading.result()
        self._ranks.refuse_together(found.refusal)
        damaged = dict(self._cut)
        for of_rank in self._ranks.gather(found.damaged):
            damaged |= of_rank
        if self._unread:
            self._ranks.on_first(lambda: self._write_record(damaged))
        return [
            f"{self._folder / name}: {reason}; it was damaged since the run began. Sequences that need what "
            "is lost are left out (train.max_left_out_sequences)"
            for name, reason in sorted(damaged.items())
        ]

    def _write_record(self, damaged: dict[str, str]) -> None:
        sound = {name: state for name, state in self._states.items() if name not in damaged}
        write_json_atomically(self._record_path, sound)

    def _look(self) -> tuple[dict[str, str], list[str], list[str], dict[str, str]]:
        """Returns, on rank 0, what all ranks need.

        File → listed checksum; the files to read, the largest first; those whose damage may be left out; and
        of these, the ones that are cut or missing → by how much.
        """
        manifest = packed_manifest(self._folder)
        if hash_manifest(self._folder) != self._tokens_hash:
            raise KieloError(f"{self._folder}: was replaced while this job started; start it again")
        names = [name for name in manifest.files if name.endswith(SUFFIXES)]
        tolerated = self._of_damage_to_leave_out(manifest)
        cut = {
            name: _shortage(self._folder / name, manifest.files[name]["bytes"])
            for name in tolerated
            if is_cut(self._folder / name, manifest.files[name]["bytes"])
        }
        names = [name for name in names if name not in cut]
        check_sizes(self._folder, manifest, names)
        self._listed = {name: manifest.files[name]["xxh3_128"] for name in names}
        # States from before the reading: a file that changes during it is read again next time.
        self._states = {
            name: [checksum, *_state(self._folder / name)] for name, checksum in self._listed.items()
        }
        verified = _read_record(self._record_path)
        unread = [name for name in names if verified.get(name) != self._states[name]]
        return self._listed, sorted(unread, key=lambda name: -manifest.files[name]["bytes"]), tolerated, cut

    def _of_damage_to_leave_out(self, manifest: Manifest) -> list[str]:
        """Returns the files of tokens of which a run that has trained goes on without what is lost.

        Before it has, sources that are read in place are compared here, since batches open them as they are.
        """
        sources = manifest.counts["sources"]
        if not self._leaves_out:
            return []
        if not has_trained(self._record_path.parent.parent):
            for name, counts in sources.items():
                if "folder" in counts:
                    open_shard(self._folder, name)
            return []
        return [f"{name}.bin" for name in sources if f"{name}.bin" in manifest.files]

    def _is_read(self) -> bool:
        return bool(wait([self._reading], timeout=WAIT_SECONDS).done)

    def _read(self, names: list[str]) -> _Found:
        """Compares files with their checksums, up to the first that is refused. Runs in the thread."""
        found = _Found()
        for name in names:
            path = self._folder / name
            try:
                checksum = hash_unless_stopped(path, self._stopped)
                if checksum in (None, self._listed[name]):
                    continue
                largest = self._largest_id(path) if name in self._tolerated else -1
            except OSError as error:
                reason = f"cannot be read ({error.strerror})"
                if name not in self._tolerated:
                    return _Found(f"{path}: {reason}")
                found.damaged[name] = reason
                continue
            if largest < self._vocab_rows:
                return _Found(_altered(path))
            found.damaged[name] = (
                f"has another checksum, and ids up to {largest:,}, but the vocabulary has "
                f"{self._vocab_rows:,} rows"
            )
        return found

    def _largest_id(self, path: Path) -> int:
        """Returns the largest id of a shard's tokens; where one is negative, the largest of its type."""
        dtype = TokenShard(path.with_name(path.name.removesuffix(".bin"))).dtype
        largest = -1
        with open(path, "rb") as file:
            while (block := file.read(READ_BYTES)) and not self._stopped.is_set():
                ids = np.frombuffer(block, dtype)
                largest = max(largest, int(ids.max()), np.iinfo(dtype).max if ids.min() < 0 else -1)
        return largest


def refuse_altered(folder: Path, manifest: Manifest) -> None:
    """Raises KieloError for a file of tokens or of their text that is not what the pack stage wrote."""
    for name, listed in manifest.files.items():
        if hash_file(folder / name) != listed["xxh3_128"]:
            raise KieloError(_altered(folder / name))


def _altered(path: Path) -> str:
    return (
        f"{path}: is not what the pack stage wrote, its checksum differs from "
        f"{path.with_name('manifest.json')}: it was altered or damaged since. No step was taken. "
        f"What would work: a whole copy of the file in its place; or move {path.parent} away, "
        "and `kielo run RECIPE --to pack` packs the same corpus again"
    )


def _shortage(path: Path, bytes_: int) -> str:
    """Returns e.g. "has 1,024 bytes of 2,048"."""
    try:
        return f"has {path.stat().st_size:,} bytes of {bytes_:,}"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def hash_unless_stopped(path: Path, stopped: Event) -> str | None:
    """Computes a file's xxh3-128 as `manifest.hash_file` does; None when `stopped` is set meanwhile."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(READ_BYTES):
            if stopped.is_set():
                return None
            digest.update(block)
    return digest.hexdigest()


def _state(path: Path) -> list[int]:
    """Returns what changes with a file: size, times in nanoseconds, inode."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _read_record(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
