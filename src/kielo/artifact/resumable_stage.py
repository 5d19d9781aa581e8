"""A stage folder whose files take hours: files that were finished before a crash are kept.

Like `manifest.write_stage` it is whole or not at all. Besides, the journal in the folder aside
(`stage_folder.py`) has, after the line with the stage's identity, a line for every large file on the disk,
with its checksums.
"""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from kielo.artifact import manifest
from kielo.artifact.durable import DurableFile
from kielo.artifact.manifest import MANIFEST_NAME, FileRecord, Hashes, Manifest, Table, as_json
from kielo.artifact.stage_folder import StageFolder
from kielo.recipe.errors import KieloError, sentence

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class FinishedFile(FileRecord):
    """A file that is complete on the disk. The manifest's files have all but its sha256."""

    xxh3_64_blocks: list[str] | None = None
    sha256: str


class ResumableStage:
    """The stage folder `folder` in the making. `kind` … `section` are its identity, as in `is_current`.

    Order, unless `is_done`: `refuse`; unless `is_written` `begin`, files into `new`, `finish`; `publish`.
    """

    def __init__(self, folder: Path, kind: str, version: int, inputs: Hashes, section: Table):
        self.folder = Path(folder)
        self._identity = (kind, version, dict(inputs), as_json(section))
        self._place = StageFolder(folder, kind, manifest.hash_json(self._identity))
        self.new = self._place.new
        self.finished: dict[str, FinishedFile] = {}
        self._missing_bytes = 0
        self._small: dict[str, FinishedFile] = {}
        self._began = time.monotonic()

    def is_done(self) -> bool:
        """Return True if `folder` holds this stage, after removing what a killed `publish` left."""
        is_done = manifest.is_current(self.folder, *self._identity)
        if is_done and not self.new.exists():
            self._place.remove()
        return is_done

    def is_written(self) -> bool:
        """Return True if an earlier attempt was killed when only the name was missing."""
        return manifest.is_current(self.new, *self._identity)

    def refuse(self) -> None:
        manifest.refuse_foreign(self.folder, self._identity[0])

    def begin(self) -> None:
        """Open the folder aside, with finished files of an earlier attempt. KieloError if it is in use."""
        self._journal = journal = self._place.begin(is_resumed=True)
        journal.seek(0)
        sound, self.finished = self._read_journal(journal.read())
        journal.truncate(sound)
        if not sound:
            journal.write(self._place.head)
            os.fsync(journal.fileno())
        for path in self.new.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in self.finished:
                path.unlink()

    def expect(self, num_bytes: int) -> None:
        """Note the bytes that are still to be written. OSError at once if the disk has no room."""
        self._missing_bytes = num_bytes
        if num_bytes > shutil.disk_usage(self.new).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def add(self, name: str, record: FinishedFile) -> None:
        self._journal.write(json.dumps({"file": name} | record.content()).encode() + b"\n")
        os.fsync(self._journal.fileno())
        self.finished[name] = record
        self._missing_bytes -= record.bytes

    def write(self, name: str, data: bytes, is_listed: bool = True) -> None:
        """Write a small file, which a later attempt writes again. is_listed: it is in the manifest."""
        with DurableFile(self.new / name) as file:
            file.write(data)
        if is_listed:
            self._small[name] = FinishedFile(
                bytes=len(data),
                xxh3_128=xxhash.xxh3_128_hexdigest(data),
                sha256=hashlib.sha256(data).hexdigest(),
            )

    def finish(self, counts: Mapping[str, Any]) -> None:
        """Write the manifest of all files. Its counts get the sha256 of each file."""
        records = dict(sorted((self.finished | self._small).items()))
        sha256 = {name: record.sha256 for name, record in records.items()}
        files = {
            name: FileRecord(**record.model_dump(exclude_unset=True, exclude={"sha256"}))
            for name, record in records.items()
        }
        seconds = time.monotonic() - self._began
        written = Manifest.of_now(*self._identity, as_json(counts) | {"sha256": sha256}, seconds, files)
        manifest.write_json_atomically(self.new / MANIFEST_NAME, written.content())

    def publish(self) -> None:
        manifest.refuse_foreign(self.folder, self._identity[0])  # again: the work can have taken hours
        self._place.publish()

    def close(self) -> None:
        self._place.close()

    def discard(self) -> None:
        self._place.discard()

    def stopped(self, error: OSError) -> KieloError:
        """Return the message of a failed write: the cause, the finished files, and the next command."""
        why = sentence(error) or str(error)
        if error.errno in _DISK_FULL:
            free = shutil.disk_usage(next(folder for folder in self.new.parents if folder.exists())).free
            why = f"disk full: {self._missing_bytes:,} more bytes are needed, {free:,} are free"
        return KieloError(
            f"{self.folder}: the {self._identity[0]} was not finished: {why}. {len(self.finished)} finished "
            f"files stay in {self.new}. Fix: the same command resumes from there"
        )

    def _read_journal(self, content: bytes) -> tuple[int, dict[str, FinishedFile]]:
        """Return (bytes of the sound lines, finished files by name). A kill can tear the last line."""
        sound, finished = 0, dict[str, FinishedFile]()
        for line in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not sound and line != self._place.head:
                return 0, {}
            sound += len(line)
            if name := entry.pop("file", None):
                finished[name] = FinishedFile.model_validate(entry)
        return sound, {name: file for name, file in finished.items() if self._is_whole(name, file.bytes)}

    def _is_whole(self, name: str, size: int) -> bool:
        path = self.new / name
        return path.is_file() and path.stat().st_size == size
