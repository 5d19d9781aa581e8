"""What a power cut would leave: the order of writes, fsyncs and renames of the code under test.

A file or folder is on the disk while its content is that of its last fsync. `DiskOrder` notes every fsync and
rename of the process, and says at each name that a file or folder took what was not on the disk by then.
"""

import hashlib
import os
from pathlib import Path

import pytest


class DiskOrder:
    """Watches `os.fsync`, `os.rename` and `os.replace`. events: "fsync PATH" and "name PATH", in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.events: list[str] = []
        self._synced: dict[int, object] = {}  # inode → content
        self._unwritten: dict[str, list[str]] = {}  # name → what below it was not on the disk when it took it
        self._real_fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._fsync)
        for call in (os.rename, os.replace):
            monkeypatch.setattr(os, call.__name__, self._naming(call))

    def is_on_disk(self, path: Path) -> bool:
        """Returns True if the file, or the list of what a folder holds, is as it was brought there."""
        return self._synced.get(os.stat(path).st_ino) == _content(path)

    def complaints(self, path: Path) -> list[str]:
        """Returns what is wrong with the last time that something took the name `path`; [] if it is durable.

        All of it must be on the disk before it is named, and then the folder that holds the name.
        """
        named = f"name {path}"
        if named not in self.events:
            return ["it was never named"]
        last = len(self.events) - 1 - self.events[::-1].index(named)
        found = [f"{name} was named before it was on the disk" for name in self._unwritten[str(path)]]
        if f"fsync {path.parent}" not in self.events[last:]:
            found.append("its name was not brought to the disk")
        return found

    def _fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self._real_fsync(descriptor)
        self._synced[os.fstat(descriptor).st_ino] = _content(path)
        self.events.append(f"fsync {path}")

    def _naming(self, call):
        def name(source, to, **more) -> None:
            source, to = Path(source), Path(to)
            below = [source, *source.rglob("*")] if source.is_dir() else [source]
            self._unwritten[str(to)] = [
                str(to / path.relative_to(source))
                for path in sorted(below)
                if not path.is_symlink() and not self.is_on_disk(path)
            ]
            call(source, to, **more)
            self.events.append(f"name {to}")

        return name


def _content(path: Path) -> object:
    if path.is_dir():
        return sorted(os.listdir(path))
    return hashlib.sha256(path.read_bytes()).digest()
