"""A small run that is launched on a scheduler of this machine: what its files say, and its ranks."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import load_file

from kielo.launch.decide import Attempt
from kielo.launch.status import status
from tests.docs.toy_text import write_texts
from tests.slurm.one_machine import processes, wait_until

NAME = "chained"
CARD = """\
name = "one_machine"
description = "a scheduler's nodes on one machine"
accelerator = "cpu"
devices_per_node = 1
nodes = 4
memory_gib_per_node = 2
cpu_cores_per_node = 1
network = "none"
network_gbit_per_second_per_node = 0
max_wall_hours = 0.5
internet_on_compute_nodes = true
source = "tests"
date = "2026-11"
"""
STEPS = 48  # of six sequences, which two ranks and three can share
RECIPE = [
    f"name={NAME}", "language=fi", "corpus.sources=my_text.txt", "tokenizer.vocab_size=700",
    f"train.tokens={1536 * STEPS}", "train.tokens_per_step=1536", "train.micro_batch_sequences=1",
    "dataset.max_epochs=100", "train.log_every_steps=1", "checkpoint.every_steps=100",
]  # fmt: skip
# Seconds from a submission to a step, where other work has the machine; 10 are usual.
LIMIT_SECONDS = 600


def pack(folder: Path, card: str, scheduler: str) -> Path:
    """Makes text, card, and the run with its tokens in `folder`, which it returns.

    card: the name of its file, which no other card has: cards are read once. scheduler: the lines of the card
    that it needs. What this starts has no variable of a scheduler.
    """
    write_texts(folder)
    (folder / card).write_text(CARD + scheduler)
    sets = [word for entry in [*RECIPE, f"cluster={card}"] for word in ("--set", entry)]
    run_kielo(["run", "own_text", *sets, "--to", "pack"], folder)
    return folder


def train_undisturbed(packed: Path, folder: Path, ranks: int) -> dict[str, bytes]:
    """Trains a copy of the packed run in `folder` without a stop; returns its weights."""
    shutil.copytree(packed, folder)
    run_kielo(["train", f"runs/{NAME}", "--ranks", str(ranks)], folder)
    return weights(folder / "runs" / NAME)


def run_kielo(words: list[str], folder: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(folder / "log", "ab") as log:  # not a pipe, which what it leaves behind could hold open
        subprocess.run(
            [sys.executable, "-m", "kielo", *words], cwd=folder, env=environment, stdout=log, stderr=log,
            check=True, timeout=LIMIT_SECONDS,
        )  # fmt: skip


def weights(folder: Path) -> dict[str, bytes]:
    """Chunk of a tensor → its bytes, of the last checkpoint: weights and the optimizer's state."""
    newest = folder / "train" / "checkpoints" / f"step_{STEPS:08d}"
    return {
        key: value.tobytes()
        for file in sorted(newest.glob("rank_*.safetensors"))
        for key, value in load_file(file).items()
    }


def pending(pid: int) -> int:
    """Returns the signals that wait for a process, as bits."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("ShdPnd")), 16)


@dataclass(frozen=True)
class LaunchedRun:
    """The last launch of the run in `place`. of_scheduler: variables that all its jobs have."""

    place: Path
    of_scheduler: dict[str, str]

    @property
    def folder(self) -> Path:
        return self.place / "runs" / NAME

    @property
    def launch(self) -> Path:
        return status(self.folder).folder

    @property
    def ids(self) -> list[str]:
        return status(self.folder).ids

    @property
    def attempts(self) -> list[Attempt]:
        return status(self.folder).attempts

    @property
    def outcomes(self) -> list[str]:
        """How each attempt ended; empty: it did not say."""
        return [attempt.outcome for attempt in self.attempts]

    @property
    def stopped(self) -> str:
        """Why the chain ended; empty: it has not."""
        return status(self.folder).stopped

    @property
    def last_step(self) -> int:
        row = status(self.folder).last_step
        return row.step if row else 0

    @property
    def newest_step(self) -> int:
        """The step of the newest whole checkpoint; 0: there is none."""
        found = sorted((self.folder / "train" / "checkpoints").glob("step_????????/manifest.json"))
        return int(found[-1].parent.name.removeprefix("step_")) if found else 0

    def ranks(self) -> list[int]:
        """Returns the processes of this machine's jobs that train the run."""
        found = processes(self.of_scheduler).items()
        return [pid for pid, words in found if {"kielo", "train"} <= set(words) and "python" in words[0]]

    def freeze(self, job: str, restarts: int = 0, ranks: int = 2) -> int:
        """Stops all ranks of a job in mid-run, after two steps of its own; returns the last logged step.

        What comes then finds them in a step that is not the last, however fast or slow the machine is.
        """
        begun = f"start\t{job}\t{restarts}\t"
        attempts = self.launch / "chain" / "attempts"
        self.wait(lambda: attempts.exists() and begun in attempts.read_text())
        before = self.newest_step
        self.wait(lambda: self.last_step >= before + 2)
        found = self.ranks()
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
        assert len(found) == ranks and before + 2 <= self.last_step < STEPS, self.logs()
        return self.last_step

    def was_signalled(self) -> bool:
        """Does SIGUSR1 wait for each rank that is stopped?"""
        bit = 1 << (signal.SIGUSR1 - 1)
        return all(bit & pending(pid) for pid in self.ranks())

    def wake(self) -> None:
        for pid in self.ranks():
            os.kill(pid, signal.SIGCONT)

    def wait(self, what: Callable[[], bool]) -> None:
        """Waits; where it does not come, the error has the ends of the jobs' logs."""
        wait_until(what, LIMIT_SECONDS, self.logs)

    def logs(self) -> str:
        paths = sorted((self.folder / "launch").glob("*/logs/**/*.*"))
        files = [path for path in paths if path.is_file()]
        return "\n".join(f"{path}:\n{path.read_text(errors='replace')[-1500:]}" for path in files)
