"""Soak: 8 gloo ranks train a small model, and a random fault comes every minute, for as long as asked.

    python benchmarks/faults/soak.py --minutes 5
    python benchmarks/faults/soak.py --minutes 600 --seed 2  # a night

Each step waits for `--wait` seconds, as for devices (`soak_step.py`); a save comes every five steps. `FAULTS`
lists the faults, with their rows of docs/fault_matrix.toml. They come in a random order in which each comes
once before one comes again, every time at another rank. A job that has ended is started again at once, by
the same command.

At the end the run is stopped and saves. A run that nothing harms, and whose steps do not wait, trains up to
the same step: weights and moments must have the same bits. Of each fault, in seconds after it: `found` until
a message named it, or until the job had ended; `next_step` until a step was taken after that; `recovered`
until a step that was not reached before. `still` is the longest time without a step.

The effective share is the time of all steps, as long as they were before the first fault, by that of the
soak. It is compared with what the faults allow by the planner's model (`plan/failures.py`) at their rate,
with the mean of `still` as the time that a failure costs beside the steps that are lost.

Everything runs in namespaces of its own where the machine allows that: the disk that fills is a tmpfs, and
mounts and processes end with the soak, however it ends. Elsewhere the disk is left out. Writes
results/soak.json.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import torch
from restart import children, pack
from soak_step import FLIP_SIGNAL, WAIT_SECONDS

from kielo.artifact.attempt_files import EXIT_CODES
from kielo.artifact.checkpoint_folder import step_folders, step_of
from kielo.artifact.manifest import MANIFEST_NAME
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.plan.failures import Save, effective_share

BAR_SHARE = 0.9  # of what the faults allow
STEPS, SAVED_EVERY = 100_000, 5
DISK_BYTES = 256 << 20
LIMIT_SECONDS = 300.0  # longest wait for anything
IN_NAMESPACES = "KIELO_SOAK_IN_NAMESPACES"
NAMESPACES = ("unshare", "-rm", "--pid", "--fork", "--kill-child", "--mount-proc")
LONG_RUN = (f"train.tokens={STEPS * 512}", f"train.heldout_every_steps={STEPS}", "dataset.max_epochs=4000")
SETTINGS = (
    f"checkpoint.every_steps={SAVED_EVERY}",
    "checkpoint.keep_newest=3",
    "train.hang_seconds=5",
    "train.compare_replicas_every_steps=5",
)


class Failed(Exception):
    """Raised for what the soak finds wrong."""


@dataclass
class Job:
    """A training that is under way: its processes, what it printed, and the steps that it took.

    process: the launcher. template: the process that forks the ranks, which end with it; None: not known.
    furthest: the last step that was reached, at the times of `reached_at`. steps_at: times of all steps.
    """

    folder: Path
    ranks: int
    settings: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen | None = None
    template: int | None = None
    lines: list[tuple[float, str]] = field(default_factory=list)
    steps_at: list[float] = field(default_factory=list)
    furthest: int = 0
    reached_at: dict[int, float] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        settings = [part for setting in self.settings for part in ("--set", setting)]
        ranks = ["--ranks", str(self.ranks), "--restarts", "1000"]
        return [sys.executable, "-m", "kielo", "train", "restart.toml", *ranks, *settings]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | self.variables

    def start(self) -> None:
        self.template = None
        self.process = subprocess.Popen(
            self.command,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen) -> None:
        for line in process.stdout:
            at, words = time.monotonic(), line.split()
            self.lines.append((at, line.rstrip()))
            if line.startswith("step ") and "loss" in words:
                self.steps_at.append(at)
                step = int(words[1].partition("/")[0].replace(",", ""))
                if step > self.furthest:
                    self.reached_at[step], self.furthest = at, step

    def processes(self) -> list[int]:
        """Returns the launcher, the process that forks the ranks, and the ranks in order."""
        (self.template,) = children(self.process.pid)
        return [self.process.pid, self.template, *children(self.template)]

    def send(self, rank: int, number: int) -> None:
        _, _, *ranks = self.processes()
        os.kill(ranks[rank], number)

    def wait_for(self, words: str, since: float) -> float:
        """Waits for a line with these words; returns when it came."""
        self.until(lambda: self.said(words, since) is not None, repr(words))
        return self.said(words, since)

    def said(self, words: str, since: float) -> float | None:
        return next((at for at, line in self.lines[:] if at >= since and words in line), None)

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Waits for something that a job does while it runs."""
        end = time.monotonic() + LIMIT_SECONDS
        while not is_so():
            if time.monotonic() > end or self.process.poll() is not None:
                raise Failed(f"{what} did not come; {self._last_words()}")
            time.sleep(0.02)

    def wait(self, code: int) -> float:
        """Waits until the job has ended with this exit code; returns when."""
        ended = self.process.wait(LIMIT_SECONDS)
        if ended != code:
            raise Failed(f"exit code {ended} and not {code}; {self._last_words()}")
        return time.monotonic()

    def _last_words(self) -> str:
        words = [line for _, line in self.lines[:] if not line.startswith("step ")]
        return "\n".join([f"step {self.furthest} was reached; what the run said last:", *words[-30:]])

    def kill(self) -> None:
        """Ends all processes at once, wherever the job stands."""
        with suppress(OSError, ValueError):
            self.processes()
        if self.process is not None:
            self.process.kill()  # before the ranks, which it would start again
            if self.template is not None and _is_alive(self.template):
                os.kill(self.template, signal.SIGKILL)
            self.process.wait()

    def newest(self) -> Path | None:
        found = step_folders(self.folder / "run" / "train" / "checkpoints")
        return next((path for path in found if (path / MANIFEST_NAME).exists()), None)

    def wait_for_save(self) -> Path:
        before = self.newest()
        self.until(lambda: self.newest() not in (None, before), "a checkpoint")
        return self.newest()


def killed_rank(job: Job, rank: int) -> float:
    """SIGKILL to one rank."""
    at = time.monotonic()
    job.send(rank, signal.SIGKILL)
    return job.wait_for("are restarted", at)


def frozen_rank(job: Job, rank: int) -> float:
    """SIGSTOP to one rank."""
    at = time.monotonic()
    job.send(rank, signal.SIGSTOP)
    found = job.wait_for(f"rank {rank}", job.wait_for("the job hangs", at))
    job.wait_for("are restarted", found)
    return found


def killed_launcher(job: Job, rank: int) -> float:
    """SIGKILL to the command; its ranks save and end."""
    processes = job.processes()
    job.process.kill()
    return _started_again(job, processes)


def killed_job(job: Job, rank: int) -> float:
    """SIGKILL to the command and all ranks."""
    processes = job.processes()
    for process in processes:  # the launcher first, which would start ranks again
        with suppress(ProcessLookupError):  # the ranks end with the process that forked them
            os.kill(process, signal.SIGKILL)
    return _started_again(job, processes)


def _started_again(job: Job, processes: list[int]) -> float:
    """Starts a job again when its processes have ended; returns when they had."""
    job.process.wait(LIMIT_SECONDS)
    end = time.monotonic() + LIMIT_SECONDS
    while any(map(_is_alive, processes)):
        if time.monotonic() > end:
            raise Failed("processes of a killed job do not end")
        time.sleep(0.02)
    found = time.monotonic()
    job.start()
    return found


def stopped_job(job: Job, rank: int) -> float:
    """SIGTERM to the command: it saves and ends."""
    job.process.terminate()
    found = job.wait(EXIT_CODES["requeue"])
    job.start()
    return found


def damaged_checkpoint(job: Job, rank: int) -> float:
    """A bit of a file of the newest checkpoint is flipped, and a rank killed."""
    newest, at = job.wait_for_save(), time.monotonic()
    file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    killed_rank(job, rank)
    return job.wait_for("is damaged and skipped", at)


def full_disk(job: Job, rank: int) -> float:
    """A file takes all room until a save has failed; the next one must work."""
    filler, at = job.folder / "filler", time.monotonic()

    def is_told() -> bool:
        with suppress(OSError), open(filler, "ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        return job.said("was not saved", at) is not None

    try:
        job.until(is_told, "a save that fails")
    finally:
        filler.unlink()
    job.wait_for_save()
    return job.wait_for("was not saved", at)


def flipped_bit(job: Job, rank: int) -> float:
    """Flips a bit of one weight, in the memory of one rank."""
    at = time.monotonic()
    job.send(rank, FLIP_SIGNAL)
    return job.wait_for("The run went back", job.wait_for(f"on rank {rank}", at))


def damaged_text(job: Job, rank: int) -> float:
    """The file of the tokens is cut: the job stops, and goes on when the file is whole again."""
    at = time.monotonic()
    file = max((job.folder / "run" / "tokens").rglob("*.bin"), key=lambda path: path.stat().st_size)
    content = file.read_bytes()
    os.truncate(file, len(content) // 2)
    found = job.wait(EXIT_CODES["failed"])
    if job.said("it was cut", at) is None:
        raise Failed("no line says that the file of tokens was cut")
    file.write_bytes(content)
    job.start()
    return found


def second_job(job: Job, rank: int) -> float:
    """Gives the same command beside the one that runs, which is refused."""
    second = subprocess.run(
        job.command,
        cwd=job.folder,
        env=job.environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    if second.returncode != EXIT_CODES["failed"] or "another job works in this folder" not in second.stderr:
        raise Failed(f"a second job was not refused: {second.returncode}, {second.stderr[-2000:]}")
    return time.monotonic()


# By kind: the row of docs/fault_matrix.toml, and what causes it and returns when it was found.
FAULTS: dict[str, tuple[str, Callable[[Job, int], float]]] = {
    "killed rank": ("R1", killed_rank),
    "frozen rank": ("R2", frozen_rank),
    "killed launcher": ("R4", killed_launcher),
    "killed job": ("R4", killed_job),
    "stopped job": ("R6", stopped_job),
    "damaged checkpoint": ("R8", damaged_checkpoint),
    "full disk": ("R9", full_disk),
    "flipped bit": ("R12", flipped_bit),
    "damaged text": ("R14", damaged_text),
    "second job": ("R24", second_job),
}


def main() -> None:
    options = _options()
    _enter_namespaces()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as name, _own_disk(Path(name)) as has_own_disk:
        folder, kinds = Path(name), [kind for kind in options.faults if has_own_disk or kind != "full disk"]
        if len(kinds) < len(options.faults):
            print("full disk: left out, as no file system can be mounted here", flush=True)
        try:
            result = _result(options, *_soak(folder, options, kinds))
        except (Failed, subprocess.TimeoutExpired) as error:
            raise SystemExit(f"NOT passed: {error}") from error
    path = Path(options.to) / "soak.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1), f"\nwritten to {path}")
    if not result["passed"]:
        raise SystemExit("NOT passed")


def _soak(folder: Path, options: argparse.Namespace, kinds: list[str]) -> tuple[list[dict], dict]:
    """Trains with faults, then without. Returns what became of each fault, and what of the run."""
    harmed, alone, patch = folder / "harmed", folder / "alone", folder / "patch"
    pack(harmed)
    shutil.copytree(harmed, alone)
    patch.mkdir()
    shutil.copy(Path(__file__).with_name("soak_step.py"), patch / "sitecustomize.py")
    path = os.pathsep.join([str(patch), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, WAIT_SECONDS: str(options.wait)}
    job = Job(harmed, options.ranks, (*_of_the_run(options.ranks), *SETTINGS), variables)
    try:
        faults, run = _train_and_harm(job, options, kinds)
    finally:
        job.kill()
    one, other = read_tensors(job.newest()), read_tensors(_undisturbed(alone, options.ranks, run["steps"]))
    same = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return faults, run | {"has_the_same_bits": same}


def _train_and_harm(job: Job, options: argparse.Namespace, kinds: list[str]) -> tuple[list[dict], dict]:
    """Trains with faults until the time is up, and lets it save."""
    chosen = random.Random(options.seed)
    ranks = chosen.sample(range(options.ranks), options.ranks)
    job.start()
    job.until(lambda: job.furthest >= 2 * SAVED_EVERY, "the first checkpoint")
    began, first = time.monotonic(), job.furthest
    step_seconds, waiting = 0.0, []
    faults: list[dict] = []
    while time.monotonic() < began + 60 * options.minutes - options.every / 2:
        _sleep_until(began + (len(faults) + 0.5) * options.every)
        step_seconds = step_seconds or _median_step(job, first)
        waiting = waiting or chosen.sample(kinds, len(kinds))
        faults.append(_harm(job, waiting.pop(), ranks[len(faults) % len(ranks)]))
        print(json.dumps(faults[-1]), flush=True)
    _sleep_until(began + 60 * options.minutes)
    job.process.terminate()
    job.wait(EXIT_CODES["requeue"])
    steps = step_of(job.newest())
    seconds = job.reached_at[job.furthest] - job.reached_at[first]
    return faults, {
        "steps": steps,
        "step_seconds": step_seconds,
        "effective_share": (job.furthest - first) * step_seconds / seconds,
    }


def _harm(job: Job, kind: str, rank: int) -> dict:
    """Causes a fault, and waits for a step that was not reached before."""
    row, cause = FAULTS[kind]
    at, step = time.monotonic(), job.furthest
    found = cause(job, rank)
    reached = max(taken for taken, when in job.reached_at.items() if when <= found)
    job.until(lambda: job.reached_at.get(reached + 1, found) > found, f"a step after {kind}")
    steps = job.steps_at[:]
    around = steps[bisect(steps, at) - 1 :]
    return {
        "fault": kind,
        "row": row,
        "rank": rank,
        "step": step,
        "found_seconds": round(found - at, 2),
        "next_step_seconds": round(steps[bisect(steps, found)] - at, 2),
        "recovered_seconds": round(job.reached_at[reached + 1] - at, 2),
        "still_seconds": round(max(later - one for one, later in pairwise(around)), 2),
    }


def _median_step(job: Job, first: int) -> float:
    """Returns the seconds of a step with its share of a save, since the step `first`."""
    job.until(lambda: job.furthest >= first + 2 * SAVED_EVERY, "steps to be timed")
    spans = [
        job.reached_at[step] - job.reached_at[step - SAVED_EVERY]
        for step in range(first + SAVED_EVERY, job.furthest + 1)
    ]
    return statistics.median(spans) / SAVED_EVERY


def _undisturbed(folder: Path, ranks: int, steps: int) -> Path:
    """Takes as many steps, without a wait and without any fault; returns the checkpoint."""
    settings = (f"checkpoint.every_steps={steps}", "train.log_every_steps=25")
    job = Job(folder, ranks, (*_of_the_run(ranks), *settings))
    job.start()
    try:
        while job.newest() is None:
            before = len(job.lines)
            job.until(lambda before=before: len(job.lines) > before or job.newest(), "the next 25 steps")
        return job.newest()
    finally:
        job.kill()


def _result(options: argparse.Namespace, faults: list[dict], run: dict) -> dict:
    down = statistics.mean(max(0.0, one["still_seconds"] - run["step_seconds"]) for one in faults)
    # What a save costs is in the seconds of a step.
    allowed = effective_share(SAVED_EVERY * run["step_seconds"], Save(0.0, 0.0), options.every, down)
    return {
        "date": date.today().isoformat(),
        "machine": {"cores": os.cpu_count(), "load_before": round(options.load, 1)},
        "versions": {name: version(name) for name in ("kielo", "torch")},
        "ranks": options.ranks,
        "minutes": options.minutes,
        "fault_every_seconds": options.every,
        "seed": options.seed,
        "steps": run["steps"],
        "steps_from_save_to_save": SAVED_EVERY,
        "step_seconds": round(run["step_seconds"], 3),
        "faults": len(faults),
        "cases": [_case(kind, faults) for kind in FAULTS if any(one["fault"] == kind for one in faults)],
        "effective_share": round(run["effective_share"], 3),
        "share_that_the_faults_allow": round(allowed, 3),
        "bar_share": BAR_SHARE,
        "has_the_same_bits": run["has_the_same_bits"],
        "passed": run["has_the_same_bits"] and run["effective_share"] >= BAR_SHARE * allowed,
    }


def _case(kind: str, faults: list[dict]) -> dict:
    """Returns the longest seconds of all faults of a kind."""
    of_kind = [one for one in faults if one["fault"] == kind]
    keys = ("found_seconds", "next_step_seconds", "recovered_seconds", "still_seconds")
    longest = {key: max(one[key] for one in of_kind) for key in keys}
    return {"fault": kind, "row": FAULTS[kind][0], "times": len(of_kind)} | longest


def _of_the_run(ranks: int) -> tuple[str, ...]:
    """Returns settings: many steps, and at least three replicas, of which a wrong one can be told."""
    shard = 2 if ranks >= 8 else 1
    return (*LONG_RUN, f"layout.replicate={ranks // shard}", f"layout.shard={shard}")


def _enter_namespaces() -> None:
    """Starts this program again in namespaces of its own, if the machine has them."""
    if IN_NAMESPACES in os.environ or shutil.which(NAMESPACES[0]) is None:
        return
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode == 0:
        variables = os.environ | {IN_NAMESPACES: "1"}
        os.execvpe(NAMESPACES[0], [*NAMESPACES, sys.executable, *sys.argv], variables)


@contextmanager
def _own_disk(folder: Path) -> Iterator[bool]:
    """Makes the folder a small disk of its own, if the soak has its own namespaces; gives whether it is."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    is_mounted = IN_NAMESPACES in os.environ and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


def _is_alive(process: int) -> bool:
    with suppress(OSError):
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[0] not in "ZX"
    return False


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds from one fault to the next")
    parser.add_argument("--ranks", type=int, default=8, help="4, 8 or 16: a step has 16 sequences")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--wait", type=float, default=0.4, help="seconds that each step waits")
    parser.add_argument("--seed", type=int, default=1, help="of the order of faults and ranks")
    parser.add_argument("--to", default=str(Path(__file__).parents[1] / "results"))
    options = parser.parse_args()
    options.load = os.getloadavg()[0]
    return options


if __name__ == "__main__":
    main()
