"""The copies of a run's state on one node, as files in its memory file system; torch-free.

    /dev/shm/kielo_UID/RUN/node_FIRST-RANK/step_00000110.ID.AFTER/rank_00000.safetensors ...

RUN is a hash of the path of the checkpoints, ID the save id of the copy, AFTER the save id of the newest
checkpoint on the disk at that time. `NAME.partial` is being written.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kielo.artifact.checkpoint_faults import FaultyCheckpoint
from kielo.artifact.checkpoint_folder import step_folder_name, step_of
from kielo.artifact.checkpoint_index import listed_files
from kielo.recipe.errors import KieloError

MEMORY_FOLDER = Path("/dev/shm")
_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FREE_SHARE = 0.05  # of the file system's size, left to communicators, which end their rank without it


def is_own(path: Path) -> bool:
    """Return True for a file or folder of this user that is no link; False also if it does not exist."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not stat.S_ISLNK(found.st_mode)


@dataclass(frozen=True)
class CopyName:
    step: int
    save_id: str
    after: str

    def __str__(self) -> str:
        return f"{step_folder_name(self.step)}.{self.save_id}.{self.after}"

    @classmethod
    def parse(cls, text: str) -> "CopyName | None":
        """Return the name that a folder has, or None for any other folder."""
        parts = text.split(".")
        step = step_of(Path(parts[0]))
        return None if step is None or len(parts) != 3 or parts[2] == "partial" else cls(step, *parts[1:])


@dataclass
class FoundCopy:
    """A copy as found: name → bytes of existing files, and of the files that its manifest lists, if any."""

    files: dict[str, int] = field(default_factory=dict)
    listed: dict[str, int] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return bool(self.listed) and self.files.items() >= self.listed.items()

    def add(self, other: "FoundCopy") -> None:
        self.files |= other.files
        self.listed |= other.listed


class NodeMemory:
    """The copies of a run on this node, whose first rank is `first_rank`. `folder` is for all nodes."""

    def __init__(self, checkpoints: Path, first_rank: int):
        name = hashlib.sha256(str(checkpoints.resolve()).encode()).hexdigest()[:16]
        self._of_user = MEMORY_FOLDER / f"kielo_{os.getuid()}"
        self.folder = self._of_user / name
        self._of_node = self.folder / f"node_{first_rank:05d}"

    def partial(self, name: CopyName) -> Path:
        return self._of_node / f"{name}.partial"

    def make_partial(self, name: CopyName, num_bytes: int) -> None:
        """Make that folder. Raise KieloError if num_bytes do not fit, or if it is another user's."""
        self._of_user.mkdir(mode=0o700, exist_ok=True)
        if not self._is_private():
            raise KieloError(
                f"{self._of_user} belongs to another user, or others can write there. Fix: remove it, or "
                "checkpoint.memory_every_steps = 0"
            )
        system = os.statvfs(self._of_user)
        free = int((system.f_bavail - _FREE_SHARE * system.f_blocks) * system.f_frsize)
        if num_bytes > free:
            raise KieloError(
                f"{MEMORY_FOLDER} has room for {max(0, free):,} bytes, and a copy needs {num_bytes:,} beside "
                "the copy before it. Fix: checkpoint.memory_every_steps = 0"
            )
        self.partial(name).mkdir(parents=True, exist_ok=True)

    def finish(self, name: CopyName) -> None:
        self.partial(name).rename(self._of_node / str(name))

    def abandon(self, name: CopyName) -> None:
        shutil.rmtree(self.partial(name), ignore_errors=True)

    def remove_all_but(self, name: CopyName) -> None:
        for path in self._of_node.iterdir():
            if path.name != str(name):
                shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # another run of this user has copies
            self._of_user.rmdir()

    def find(self) -> dict[CopyName, FoundCopy]:
        """Return the copies on this node, without files that cannot be read."""
        found: dict[CopyName, FoundCopy] = {}
        for name, folder in self._folders():
            copy = FoundCopy()
            with suppress(OSError):
                copy.files = {
                    entry.name: entry.stat(follow_symlinks=False).st_size
                    for entry in os.scandir(folder)
                    if entry.is_file(follow_symlinks=False) and is_own(Path(entry.path))
                }
            with suppress(OSError, FaultyCheckpoint):
                copy.listed = {file: record.bytes for file, record in listed_files(folder).items()}
            found.setdefault(name, FoundCopy()).add(copy)
        return found

    def path_of(self, name: CopyName, file: str) -> Path:
        return next(path / file for one, path in self._folders() if one == name and (path / file).exists())

    def _folders(self) -> Iterator[tuple[CopyName, Path]]:
        if not self._is_private():  # others could leave weights of theirs there
            return
        for path in sorted(self.folder.glob("node_*/step_*")):
            name = CopyName.parse(path.name)
            if name is not None and is_own(path.parent) and is_own(path):
                yield name, path

    def _is_private(self) -> bool:
        """Return True for a folder of this user in which nobody else can write."""
        return is_own(self._of_user) and not self._of_user.stat().st_mode & _FOR_OTHERS
