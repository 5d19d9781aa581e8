"""Host memory that is left to the processes of this job on this node, in bytes. Linux; without torch.

The kernel ends a process when the memory of the node is used up, or that of a control group (cgroup), by
which schedulers and containers limit a job. Page cache is given back when memory is needed, and does not
count; what is in /dev/shm does.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostMemory:
    """Bytes that can still be taken (`available`) of `limit`. owner: whose limit it is, for messages."""

    available: int
    limit: int
    owner: str

    @property
    def taken_share(self) -> float:
        return 1 - self.available / self.limit


def host_memory(root: Path = Path("/")) -> HostMemory | None:
    """Returns the memory of the node or of the job's cgroup, whichever has less left; None where unknown.

    root: the folder that holds `proc` and `sys`.
    """
    found = [*_of_node(root), *_of_groups(root)]
    return min(found, key=lambda memory: memory.available, default=None)


def _of_node(root: Path) -> list[HostMemory]:
    """Reads proc(5)'s meminfo, whose numbers are KiB."""
    with suppress(OSError, KeyError, ValueError):
        rows = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
        kib = {words[0].rstrip(":"): int(words[1]) for words in rows}
        return [HostMemory(kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024, "the node")]
    return []


def _of_groups(root: Path) -> list[HostMemory]:
    """Reads the limits of this process's cgroup and those around it, of version 2 or 1."""
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
    """Returns nothing for a group without a limit, for which version 1 gives one of exabytes."""
    limit_name, used_name, cache_name, shared_name = names
    with suppress(OSError, ValueError, KeyError):  # version 2 says "max"
        limit, used = (int((folder / name).read_text()) for name in (limit_name, used_name))
        rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        stat = {words[0]: int(words[1]) for words in rows}
        taken = used - (stat[cache_name] - stat[shared_name])
        return [HostMemory(max(0, limit - taken), limit, "the job's limit (cgroup)")]
    return []
