"""Watch what a run can use up: host memory, /dev/shm, and room on the disk for the next save. Linux.

The first rank of each node looks every few seconds. A shortage is an alert, once. If host memory has grown so
much that the kernel would soon end a process, the run saves and stops: a restart has the memory of the
beginning. The limit is the node's or the cgroup's, page cache does not count, and /dev/shm does.
"""

import gc
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LOOK_SECONDS = 5.0
_SHORT_SHARE = 0.9  # taken share of the memory's limit
_RESERVE_SHARE = 0.03  # of the limit: a run that has grown stops when less is left
_GROWTH_SECONDS = (20.0, 60.0)  # the shortest and longest time over which growth is measured
_SECONDS_TO_SAVE = 120.0  # for the step under way and a save
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_SHARE = 0.05  # an alert if a smaller share is free


@dataclass(frozen=True)
class HostMemory:
    """The available bytes of `limit`. owner: whose limit it is, for messages."""

    available: int
    limit: int
    owner: str

    @property
    def taken_share(self) -> float:
        return 1 - self.available / self.limit


def host_memory(root: Path = Path("/")) -> HostMemory | None:
    """Return the memory of the node or the job's cgroup, whichever has less left. `root` has /proc, /sys."""
    found = [*_of_node(root), *_of_groups(root)]
    return min(found, key=lambda memory: memory.available, default=None)


def _of_node(root: Path) -> list[HostMemory]:
    with suppress(OSError, KeyError, ValueError):
        rows = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
        kib = {words[0].rstrip(":"): int(words[1]) for words in rows}
        return [HostMemory(kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024, "the node")]
    return []


def _of_groups(root: Path) -> list[HostMemory]:
    found: list[HostMemory] = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "file", "shmem")
            elif "memory" in controllers.split(","):
                top = root / "sys/fs/cgroup/memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
            else:
                continue
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                found += _of_group(folder, names)
                if folder == top:
                    break
    return found


def _of_group(folder: Path, names: tuple[str, str, str, str]) -> list[HostMemory]:
    """Return nothing for a group without a limit. Version 1 then gives a limit of exabytes."""
    limit_name, used_name, cache_name, shared_name = names
    with suppress(OSError, ValueError, KeyError):  # version 2 has "max"
        limit, used = (int((folder / name).read_text()) for name in (limit_name, used_name))
        rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        stat = {words[0]: int(words[1]) for words in rows}
        taken = used - (stat[cache_name] - stat[shared_name])
        return [HostMemory(max(0, limit - taken), limit, "the job's limit (cgroup)")]
    return []


class Resources:
    """The resources of this rank's node.

    ask_to_stop(cause): makes the run save and stop. `shortage` returns why the disk has no room for the next
    save. `is_looking` is False if another rank watches the node. `read_memory` returns None if unknown.
    """

    def __init__(
        self,
        alert: Callable[[int, str], None],
        ask_to_stop: Callable[[str], None],
        shortage: Callable[[], str | None],
        is_looking: bool,
        read_memory: Callable[[], HostMemory | None] = host_memory,
        look_seconds: float = _LOOK_SECONDS,
    ):
        self._alert, self._ask_to_stop, self._shortage = alert, ask_to_stop, shortage
        self._read_memory, self._look_seconds = read_memory, look_seconds
        self._next_look = -float("inf") if is_looking else float("inf")
        self._told: set[str] = set()
        self._first: HostMemory | None = None
        self._available: deque[tuple[float, int]] = deque()  # (time, bytes) of the last minute

    def look(self, step: int) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._look_seconds
        shortage = self._shortage()
        self._tell_once(step, "disk", shortage and f"the next checkpoint cannot be saved: {shortage}")
        self._tell_once(step, "shared memory", _complaint_of_shared_memory())
        memory = self._read_memory()
        if memory is not None:
            self._look_at_memory(step, now, memory)

    def _look_at_memory(self, step: int, now: float, memory: HostMemory) -> None:
        self._first = self._first or memory
        self._available.append((now, memory.available))
        while now - self._available[0][0] > _GROWTH_SECONDS[1]:
            self._available.popleft()
        if memory.taken_share <= _SHORT_SHARE:
            self._tell_once(step, "memory", None)
            return
        grown, reserve = self._first.available - memory.available, _RESERVE_SHARE * memory.limit
        taken = (
            f"host memory of {socket.gethostname()}: {memory.taken_share:.0%} of {memory.limit / 1e9:.1f} GB "
            f"({memory.owner}) are taken, {grown / 1e9:.2f} GB more than after this attempt's first step"
        )
        if memory.available < reserve < grown or self._seconds_left() < _SECONDS_TO_SAVE:
            self._tell_once(step, "stop", f"{taken}. The run saves and stops before the kernel ends it")
            self._ask_to_stop(taken)
        else:
            self._tell_once(step, "memory", f"{taken}. When none is left, the kernel ends the run")

    def _seconds_left(self) -> float:
        """Return the seconds until no memory is left, at the rate of the last minute."""
        (first_at, first), (last_at, last) = self._available[0], self._available[-1]
        if last_at - first_at < _GROWTH_SECONDS[0] or first <= last:
            return float("inf")
        return last * (last_at - first_at) / (first - last)

    def _tell_once(self, step: int, topic: str, message: str | None) -> None:
        if message is None:
            self._told.discard(topic)
        elif topic not in self._told:
            self._told.add(topic)
            self._alert(step, message)


def _complaint_of_shared_memory() -> str | None:
    try:
        system = os.statvfs(_SHARED_MEMORY)
    except OSError:  # only Linux has it
        return None
    if system.f_bavail >= _SHARED_MEMORY_SHARE * system.f_blocks:
        return None
    return (
        f"{_SHARED_MEMORY} of {socket.gethostname()} is nearly full: {system.f_bavail * system.f_frsize:,} "
        "bytes are free, and a communicator without room there ends its rank. Fix: remove what earlier jobs "
        "left in it"
    )


class Garbage:
    """Python's garbage collector at chosen steps, so that no rank waits for another's (as in torchtitan).

    every_steps: 1 if each step leaves cycles with activations.
    """

    def __init__(self, every_steps: int):
        self._every_steps = every_steps

    def begin(self) -> None:
        """Stop the collector, and exempt the objects that exist, which are the run's parts."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def step(self, step: int) -> None:
        if step % self._every_steps == 0:
            gc.collect(1)

    def collect(self) -> None:
        """Free everything left since `begin`. It is slow, so call it beside saves only."""
        gc.collect()

    def end(self) -> None:
        gc.unfreeze()
        gc.enable()
