"""The lease of a run's folder, so that jobs change it one at a time. Torch-free.

    RUN/lease.00000003.json     the holder; its modification time is the beat, renewed every few seconds

`kielo run` holds it for all its stages and hands it down to the training that it starts. Rank 0 of `kielo
train` and verbs that write a single stage hold it themselves (`held`). Verbs that only read need no lease.

Leases are numbered. A taker that finds no lease makes number 1. If the newest holder is dead, it makes the
next number, exclusively, so that one of many takers wins, and a holder that was only frozen sees its
loss. No lease is overwritten, clocks of two machines are not compared, and flock, which cluster file systems
often lack, is not needed. The beat is a file time, because a full disk must not stop it.
"""

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from kielo.artifact.this_place import machine
from kielo.recipe.errors import KieloError

logger = logging.getLogger(__name__)
BEAT_SECONDS = 10.0
# A holder on another machine counts as dead after this many missing beats, with this many looks for each.
# Looks are counted, not seconds: while the file system hangs, no look ends and nobody is declared dead.
QUIET_BEATS, LOOKS_PER_BEAT = 3, 5
# Environment variable: token of the lease that this process or its parent holds.
HANDED_DOWN = "KIELO_LEASE"
_LEASE_FILE = re.compile(r"lease\.(\d{8,})\.json")


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease. process_started: clock ticks from boot; None without /proc."""

    token: str
    host: str
    machine: str
    pid: int
    process_started: int | None
    slurm_job_id: str | None
    started_at: str

    def __str__(self) -> str:
        job = f" (Slurm job {self.slurm_job_id})" if self.slurm_job_id else ""
        return f"process {self.pid} on {self.host}{job}, since {self.started_at}"

    def is_here(self) -> bool:
        """Return True if the process is on this host, boot and set of process numbers."""
        return (self.host, self.machine) == (socket.gethostname(), machine())

    def is_running(self) -> bool:
        """Return True if a holder that `is_here` lives. A zombie or reused process number does not count."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it runs as another user
        try:
            state, started = _process_state(self.pid)
        except OSError:  # no /proc, or one that hides the processes of others
            return True
        return state not in "ZX" and started == self.process_started


@contextmanager
def held(folder: Path | str) -> Iterator["Lease"]:
    """Hold the lease of the run folder `folder` inside the block. KieloError if another job has it.

    An inner block of the folder, in this process or its children, shares the lease of its taker.
    """
    handed_down = os.environ.get(HANDED_DOWN, "")
    lease = Lease.with_token(folder, handed_down) if handed_down else None
    if lease is not None:
        yield lease
        return
    with Lease.take(folder).beating() as lease:
        os.environ[HANDED_DOWN] = lease.token
        try:
            yield lease
        finally:
            os.environ[HANDED_DOWN] = handed_down


@dataclass
class Lease:
    """The right to change a run's folder. Any rank of the job can `check` it. Its taker renews it."""

    path: Path
    text: str  # of its file
    beat_seconds: float
    lost: str | None = None  # why this job no longer holds it

    @property
    def token(self) -> str:
        return json.loads(self.text)["token"]

    @classmethod
    def with_token(cls, folder: Path | str, token: str) -> "Lease | None":
        """Return the newest lease of `folder` if it has this token. Its taker renews and returns it."""
        try:
            path = _lease_path(Path(folder), max(_numbers(Path(folder)), default=0))
            seen = _read(path)
        except OSError:
            return None
        holder = seen.holder() if seen else None
        is_ours = seen is not None and holder is not None and holder.token == token
        return cls(path, seen.text, BEAT_SECONDS) if seen and is_ours else None

    @classmethod
    def take(cls, folder: Path | str, beat_seconds: float = BEAT_SECONDS) -> "Lease":
        """Take the lease of `folder`, which is made if it is missing.

        A dead process's lease is taken over at once on this machine, and after `QUIET_BEATS` missing beats if
        it is from another machine or cannot be read. Raises KieloError with the holder while it lives.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _end_earlier_leases(folder / "train", beat_seconds)
            while True:
                last = max(_numbers(folder), default=0)
                dead = _dead_lease(_lease_path(folder, last), beat_seconds) if last else None
                if last and dead is None:
                    continue  # released during the look
                path, text = _lease_path(folder, last + 1), _own_text()
                if not _create(path, text):
                    time.sleep(0.05)  # another taker was quicker
                    continue
                # A taker that fell asleep after its look can come after other takers have come and gone.
                if max(_numbers(folder)) > last + 1 or (last and _read(_lease_path(folder, last)) != dead):
                    path.unlink()
                    continue
                for number in _numbers(folder):
                    if number <= last:
                        _lease_path(folder, number).unlink(missing_ok=True)
                return cls(path, text, beat_seconds)
        except OSError as error:
            raise KieloError(
                f"{folder}: no lease can be taken there ({error}). Fix: a writable folder with free space"
            ) from error

    def check(self) -> None:
        """Raise KieloError if the lease was lost, OSError if it is unreadable. Call it before publishing."""
        if self.lost is None:
            self._look()
        if self.lost is not None:
            raise KieloError(self.lost)

    @contextmanager
    def beating(self) -> Iterator["Lease"]:
        """Renew the lease from a thread inside the block. At the end return it, if it is still ours."""
        over = threading.Event()
        thread = threading.Thread(target=self._beat, args=(over,), name="lease", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            over.set()
            thread.join()
            with suppress(KieloError, OSError):
                self.check()
                self.path.unlink()

    def _beat(self, over: threading.Event) -> None:
        while self.lost is None and not over.wait(self.beat_seconds):
            with suppress(OSError):  # retried at the next beat; `check` reports the error
                self._look()
                if self.lost is None:
                    os.utime(self.path)
        if self.lost is not None:
            logger.warning(self.lost)

    def _look(self) -> None:
        found = _read(self.path)
        following = int(self.path.name.split(".")[1]) + 1
        taken = _read(_lease_path(self.path.parent, following))
        if taken is None and found is not None and found.text == self.text:
            return
        taker = (taken and taken.holder()) or (found and found.holder())
        why = f"{taker} works in this folder" if taker else "it was removed or replaced"
        self.lost = (
            f"{self.path} is no longer this job's: {why}; this job stops and publishes nothing more. Its "
            "last checkpoint is untouched"
        )


@dataclass(frozen=True)
class _Seen:
    """A lease file at one look. Two looks that differ show that it is alive."""

    text: str
    modified_ns: int

    def holder(self) -> Holder | None:
        try:
            content = json.loads(self.text)
            return Holder(**{entry.name: content[entry.name] for entry in fields(Holder)})
        except (ValueError, KeyError, TypeError):
            return None


def _end_earlier_leases(train_folder: Path, beat_seconds: float) -> None:
    """Refuse a live job's lease in RUN/train, its place in earlier versions; remove leases of dead jobs."""
    for number in sorted(_numbers(train_folder)) if train_folder.is_dir() else ():
        path = _lease_path(train_folder, number)
        _dead_lease(path, beat_seconds)
        path.unlink(missing_ok=True)


def _dead_lease(path: Path, beat_seconds: float) -> _Seen | None:
    """Return the lease of a dead holder, or None if it disappeared. KieloError if the holder is alive."""
    seen = _read(path)
    for _ in range(QUIET_BEATS * LOOKS_PER_BEAT):
        if seen is None:
            return None
        holder = seen.holder()
        if holder is not None and holder.is_here():
            if holder.is_running():
                raise _refusal(path, holder)
            return seen
        time.sleep(beat_seconds / LOOKS_PER_BEAT)
        again = _read(path)
        if again is not None and again != seen and holder is not None:
            raise _refusal(path, holder)
        seen = again
    whose, seconds = seen and (seen.holder() or "an unknown holder"), QUIET_BEATS * beat_seconds
    logger.warning("%s: %s gave no sign of life for %g s; taken over", path, whose, seconds)
    return seen


def _refusal(path: Path, holder: Holder) -> KieloError:
    stop = f" (scancel {holder.slurm_job_id})" if holder.slurm_job_id else ""
    return KieloError(
        f"{path.parent}: another job works in this folder: {holder}. This job has changed nothing. Fix: wait "
        f"for its end or stop it{stop}, or give this run another `folder`. The end of a dead job is noticed "
        "automatically"
    )


def _own_text() -> str:
    try:
        started = _process_state(os.getpid())[1]
    except OSError:
        started = None
    holder = Holder(
        token=uuid4().hex,
        host=socket.gethostname(),
        machine=machine(),
        pid=os.getpid(),
        process_started=started,
        slurm_job_id=os.environ.get("SLURM_JOB_ID"),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return json.dumps(asdict(holder), indent=1) + "\n"


def _process_state(pid: int) -> tuple[str, int]:
    """Return a process's state letter and start in clock ticks (proc(5), fields 3 and 22), or OSError."""
    # The second field is the program's name in parentheses, which can contain spaces and parentheses.
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    after_name = stat.rpartition(")")[2].split()
    return after_name[0], int(after_name[19])


def _create(path: Path, text: str) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _read(path: Path) -> _Seen | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return _Seen(file.read(), os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError:
        return None


def _numbers(folder: Path) -> list[int]:
    return [int(match[1]) for name in os.listdir(folder) if (match := _LEASE_FILE.fullmatch(name))]


def _lease_path(folder: Path, number: int) -> Path:
    return folder / f"lease.{number:08d}.json"
