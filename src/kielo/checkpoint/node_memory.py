"""Copies of a run's state in memory: the files on one node, and the links that bring them; torch-free.

    /dev/shm/kielo_UID/RUN/node_FIRST-RANK/step_00000110.ID.AFTER/rank_00000.safetensors ...

RUN is a hash of the path of the checkpoints, ID the save id of the copy, AFTER the save id of the newest
checkpoint on the disk at that time. `NAME.partial` is being written.
"""

import hashlib
import os
import shutil
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from kielo.artifact.checkpoint_folder import FaultyCheckpoint, step_folder_name, step_of
from kielo.artifact.checkpoint_index import listed_files
from kielo.recipe.errors import KieloError

MEMORY_FOLDER = Path("/dev/shm")
_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FREE_SHARE = 0.05  # of the file system's size, left to communicators, which end their rank without it


def is_own(path: Path) -> bool:
    """Return True for a file or folder of this user that is no link; False also if it does not exist."""
    with suppress(OSError):
        found = path.lstat()
        return found.st_uid == os.getuid() and not stat.S_ISLNK(found.st_mode)
    return False


@dataclass(frozen=True)
class CopyName:
    step: int
    save_id: str
    after: str

    def __str__(self) -> str:
        return f"{step_folder_name(self.step)}.{self.save_id}.{self.after}"

    @classmethod
    def parse(cls, text: str) -> "CopyName | None":
        parts = text.split(".")
        step = step_of(Path(parts[0]))
        return None if step is None or len(parts) != 3 or parts[2] == "partial" else cls(step, *parts[1:])


@dataclass
class FoundCopy:
    files: dict[str, int] = field(default_factory=dict)  # name → bytes of existing files
    listed: dict[str, int] = field(default_factory=dict)  # of the files in its manifest, if any

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
        found: dict[CopyName, FoundCopy] = {}
        for name, folder in self._folders():
            copy = found.setdefault(name, FoundCopy())
            with suppress(OSError):
                copy.files |= {
                    entry.name: entry.stat(follow_symlinks=False).st_size
                    for entry in os.scandir(folder)
                    if entry.is_file(follow_symlinks=False) and is_own(Path(entry.path))
                }
            with suppress(OSError, FaultyCheckpoint):
                copy.listed |= {file: record.bytes for file, record in listed_files(folder).items()}
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
        return is_own(self._of_user) and not self._of_user.stat().st_mode & _FOR_OTHERS


COPIES = 3  # copies that a link is judged by
LEAST_TIMES = 2.0  # times the seconds of the median link
LEAST_BYTES = 8 * 2**20  # of a piece: a smaller piece measures the start of sending


@dataclass(frozen=True)
class Arrival:
    """The first piece of a copy that a rank received: its bytes, and the seconds until it arrived."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class SlowLink:
    node: int  # the link's end; it begins at the node before
    seconds: float  # per byte
    usual_seconds: float  # of the median link


class SlowLinks:
    """Judge the links by the newest copies. `hosts` has each rank's host, node by node."""

    def __init__(self, hosts: Sequence[str], ranks_a_node: int):
        self._hosts, self._ranks_a_node = hosts[::ranks_a_node], ranks_a_node
        self._copies: deque[list[float]] = deque(maxlen=COPIES)
        self._reported: set[int] = set()

    def look(self, arrivals: Sequence[Arrival | None]) -> str | None:
        """Return a message about links that became slow, or None. `arrivals` has each rank's for a copy."""
        each = [one.seconds / one.num_bytes for one in arrivals if one and one.num_bytes >= LEAST_BYTES]
        if len(each) < len(arrivals):
            return None
        # the fastest of a node's ranks: a single slow rank is not the link's fault
        self._copies.append(
            [min(each[at : at + self._ranks_a_node]) for at in range(0, len(each), self._ranks_a_node)]
        )
        if len(self._copies) < COPIES:
            return None
        found = slow_links(self._copies)
        before, self._reported = self._reported, {link.node for link in found}
        return "; ".join(map(self._described, found)) if self._reported - before else None

    def _described(self, link: SlowLink) -> str:
        rate, usual = 1e-6 / link.seconds, 1e-6 / link.usual_seconds
        ends = f"{self._hosts[link.node - 1]} to {self._hosts[link.node]}"
        return (
            f"the link from {ends} is slow: a rank's bytes arrive at {rate:,.0f} MB/s, over the median link "
            f"at {usual:,.0f} MB/s. Collectives between nodes wait for it, and can lose "
            f"{1 - rate / usual:.0%} of their speed. Fix: leave one of these nodes out"
        )


def slow_links(copies: Sequence[Sequence[float]]) -> list[SlowLink]:
    """Return the links whose fastest copy takes `LEAST_TIMES` as long as the slowest usual copy, a median.

    copies: seconds per byte to each node from the node before it. Usual: the (lower) median of a copy.
    """
    usual = [sorted(of_copy)[(len(of_copy) - 1) // 2] for of_copy in copies]
    return [
        SlowLink(node, fmean(of_link), fmean(usual))
        for node, of_link in enumerate(zip(*copies, strict=True))
        if min(of_link) >= LEAST_TIMES * max(usual)
    ]
