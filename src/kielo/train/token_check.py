"""Checks token files against the checksums in their manifest, in a thread while the model is built.

Files that an earlier attempt found sound, and whose size, times and inode are unchanged, are not read again:
`train/tokens_verified.json` lists them, so that a requeued job reads nothing. The ranks share the files.
"""

import json
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any

import xxhash

from kielo.artifact.manifest import (
    READ_BYTES,
    Manifest,
    check_sizes,
    hash_file,
    hash_manifest,
    write_json_atomically,
)
from kielo.artifact.token_shards import LOSS_MASK
from kielo.checkpoint.agreement import Agreement
from kielo.dataset.batches import packed_manifest
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Resolved

RECORD_NAME = "tokens_verified.json"
SUFFIXES = (".bin", ".idx", LOSS_MASK)
# between two collectives: one that waited while terabytes are read would time out
WAIT_SECONDS = 10.0


class TokenCheck:
    """Verifies the files of the tokens folder. All ranks make it, `finish` it and leave it together.

    ranks: used by the calling thread only. Raises KieloError on every rank for a file of another size than
    listed, and for a folder that was replaced after the run was resolved.
    """

    def __init__(self, resolved: Resolved, ranks: Agreement):
        placement = resolved.placement
        self._folder, self._ranks = Path(placement.tokens_folder), ranks
        self._tokens_hash = resolved.identity.tokens_hash
        self._record_path = Path(placement.train_folder) / RECORD_NAME
        self._stopped = Event()
        self._listed, self._unread = ranks.on_first(self._look)
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokens")
        self._reading: Future[str | None] = self._reader.submit(
            self._read, self._unread[ranks.rank :: ranks.size]
        )

    def __enter__(self) -> "TokenCheck":
        return self

    def __exit__(self, *problem: object) -> None:
        self._stopped.set()
        self._reader.shutdown()

    def finish(self) -> None:
        """Waits until every rank has read its share. Raises KieloError on every rank for a changed file."""
        while not all(self._ranks.gather(self._is_read())):
            pass
        self._ranks.refuse_together(self._reading.result())
        if self._unread:
            self._ranks.on_first(lambda: write_json_atomically(self._record_path, self._states))

    def _look(self) -> tuple[dict[str, str], list[str]]:
        """Returns, on rank 0: file → listed checksum, and the files to read, the largest first."""
        manifest = packed_manifest(self._folder)
        if hash_manifest(self._folder) != self._tokens_hash:
            raise KieloError(f"{self._folder}: was replaced while this job started; start it again")
        names = [name for name in manifest.files if name.endswith(SUFFIXES)]
        check_sizes(self._folder, manifest, names)
        self._listed = {name: manifest.files[name]["xxh3_128"] for name in names}
        # States from before the reading: a file that changes during it is read again next time.
        self._states = {
            name: [checksum, *_state(self._folder / name)] for name, checksum in self._listed.items()
        }
        verified = _read_record(self._record_path)
        unread = [name for name in names if verified.get(name) != self._states[name]]
        return self._listed, sorted(unread, key=lambda name: -manifest.files[name]["bytes"])

    def _is_read(self) -> bool:
        return bool(wait([self._reading], timeout=WAIT_SECONDS).done)

    def _read(self, names: list[str]) -> str | None:
        """Compare files with their checksums, in the thread; return what is wrong with the first odd one."""
        for name in names:
            path = self._folder / name
            try:
                if hash_unless_stopped(path, self._stopped) not in (None, self._listed[name]):
                    return _altered(path)
            except OSError as error:
                return f"{path}: cannot be read ({error.strerror})"
        return None


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
