"""Check: each node writes to the run's folder, reads the file of another node, and the saves have room.

A quota may leave less than the free space that a file system reports. Only written bytes are sure.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

import numpy as np

from kielo.artifact.durable import make_folder
from kielo.recipe.errors import KieloError, sentence
from kielo.recipe.optimisers import OPTIMISERS
from kielo.resolve.resolved import Resolved
from kielo.verify.preflight.job import FILE_CHUNK_BYTES, Finding, Job, spread

_FOLDER = ".preflight.kielo"
_FP32 = 4
# Files of a checkpoint besides one for each rank: index, manifest, training state and their folders.
_FILES_BESIDE_SHARDS = 8


class Measured(TypedDict, total=False):
    complaint: str
    free_bytes: int
    free_inodes: int | None  # None: the file system does not count them
    write_gb_per_second: float
    read_gb_per_second: float


def measure(job: Job) -> Measured:
    """Return rates, free bytes and inodes and a complaint, of the rank that works for its node; else {}.

    The nodes write, wait for each other, and read in a ring: the next node's file, which is in no cache here.
    """
    nodes = list(job.ranks_of_nodes())
    mine = nodes.index(job.nodes[job.world.rank])
    folder = job.run_folder / _FOLDER
    found: Measured = {}
    if job.is_first_of_node:
        found = {"complaint": ""}
        _attempt(found, job.run_folder, _room)
        _attempt(found, folder / str(mine), lambda path: _write(path, mine, job))
    complaints = job.host.gather(found.get("complaint"))
    if job.is_first_of_node:
        other = (mine + 1) % len(nodes)
        if not found["complaint"] and not complaints[job.ranks_of_nodes()[nodes[other]][0]]:
            _attempt(found, folder / str(other), lambda path: _read(path, other, job))
    job.wait_for_all()
    if job.is_first_of_node:
        with suppress(OSError):
            (folder / str(mine)).unlink()
    job.wait_for_all()
    if job.world.rank == 0:
        with suppress(OSError):
            folder.rmdir()
    return found


def _attempt(found: Measured, path: Path, action: Callable[[Path], Measured]) -> None:
    """Add the findings of `action` at `path`. The first error of the file system becomes the complaint."""
    try:
        found.update(action(path))
    except OSError as error:
        said = sentence(OSError(error.errno, error.strerror, str(path)))
        found["complaint"] = found["complaint"] or said or ""
    except KieloError as error:
        found["complaint"] = found["complaint"] or str(error)


def _room(folder: Path) -> Measured:
    make_folder(folder)
    found = os.statvfs(folder)
    return {
        "free_bytes": found.f_bavail * found.f_frsize,
        "free_inodes": found.f_favail if found.f_files else None,
    }


def _write(path: Path, number: int, job: Job) -> Measured:
    make_folder(path.parent)
    started = time.perf_counter()
    with open(path, "wb") as file:
        for chunk in range(job.sizes.file_bytes // FILE_CHUNK_BYTES):
            file.write(chunk_of(number, chunk))
        file.flush()
        os.fsync(file.fileno())
    return {"write_gb_per_second": job.sizes.file_bytes / (time.perf_counter() - started) / 1e9}


def _read(path: Path, number: int, job: Job) -> Measured:
    started, chunks = time.perf_counter(), job.sizes.file_bytes // FILE_CHUNK_BYTES
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # a single node reads its own file
        for chunk in range(chunks):
            if file.read(FILE_CHUNK_BYTES) != chunk_of(number, chunk):
                raise KieloError(f"{path}: part {chunk} of {chunks} is not what was written")
    return {"read_gb_per_second": job.sizes.file_bytes / (time.perf_counter() - started) / 1e9}


def chunk_of(number: int, chunk: int) -> bytes:
    """Return a chunk of the file of node `number`: its two numbers in every 16 bytes."""
    return np.tile(np.array([number, chunk], dtype="<i8"), FILE_CHUNK_BYTES // 16).tobytes()


def room_needed(resolved: Resolved) -> tuple[int, int]:
    """Return the bytes and files of the run's checkpoints: the kept checkpoints and the next.

    A checkpoint holds every parameter in fp32 and its moments, one file a rank.
    """
    identity, placement, kept = resolved.identity, resolved.placement, resolved.placement.checkpoint
    for_good = identity.total_steps // kept.keep_every_steps if kept.keep_every_steps else 0
    number = kept.keep_newest + 1 + for_good
    state_bytes = OPTIMISERS[identity.train.optimiser].state_bytes(identity.train.optimiser_state)
    bytes_each = placement.parameters * (_FP32 + state_bytes)
    return number * bytes_each, number * (placement.world_size + _FILES_BESIDE_SHARDS)


def judge(found: Sequence[Measured], job: Job) -> list[Finding]:
    findings = [Finding(rank, one["complaint"]) for rank, one in enumerate(found) if one.get("complaint")]
    bytes_needed, files_needed = room_needed(job.resolved)
    where = f"{job.run_folder}: the run's checkpoints need"
    for rank, one in enumerate(found):
        if (free := one.get("free_bytes", bytes_needed)) < bytes_needed:
            said = f"{where} {bytes_needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free"
            findings.append(Finding(rank, said))
        if (inodes := one.get("free_inodes")) is not None and inodes < files_needed:
            findings.append(Finding(rank, f"{where} {files_needed:,} files, and {inodes:,} inodes are free"))
    return findings


def summarise(found: Sequence[Measured], job: Job) -> str:
    written = [one["write_gb_per_second"] for one in found if "write_gb_per_second" in one]
    read = [one["read_gb_per_second"] for one in found if "read_gb_per_second" in one]
    rates = [f"{what} {spread(of, 'GB/s')}" for what, of in (("write", written), ("read", read)) if of]
    free = [one["free_bytes"] for one in found if "free_bytes" in one]
    room = f"{min(free) / 1e9:,.3g} GB free" if free else "no free space known"
    return ", ".join([*rates, f"{room}, {room_needed(job.resolved)[0] / 1e9:.3g} GB needed"])
