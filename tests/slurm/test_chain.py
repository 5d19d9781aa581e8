"""A chain of jobs on a real Slurm of four nodes: `make test-slurm`."""

import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from kielo.cli.main import main
from tests.docs.toy_text import write_texts
from tests.slurm.one_machine import slurm, why_not

CARD = """\
name = "four_nodes"
description = "four Slurm nodes on one machine"
accelerator = "cpu"
devices_per_node = 1
nodes = 4
memory_gib_per_node = 2
cpu_cores_per_node = 1
network = "none"
network_gbit_per_second_per_node = 0
scheduler = "slurm"
max_wall_hours = 0.16
internet_on_compute_nodes = true
source = "tests"
date = "2026-11"

[jobs]
partitions = [{ name = "work" }]

[jobs.sources]
partitions = "tests"
"""
RECIPE = [
    "language=fi", "corpus.sources=my_text.txt", "cluster=card.toml", "train.tokens=163840",
    "dataset.max_epochs=100", "train.log_every_steps=1", "checkpoint.every_steps=10",
]  # fmt: skip
LIMIT_SECONDS = 500

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


@pytest.fixture
def place(tmp_path, monkeypatch, scheduler) -> Path:
    """A folder with text and the card, from which the scheduler's commands find it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", scheduler["SLURM_CONF"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_texts(tmp_path)
    (tmp_path / "card.toml").write_text(CARD)
    return tmp_path


def packed(name: str) -> Path:
    """A run with its tokens made."""
    sets = [word for entry in [f"name={name}", *RECIPE] for word in ("--set", entry)]
    assert main(["run", "own_text", *sets, "--to", "pack"]) == 0
    return Path("runs") / name


def wait_for(what: Callable[[], bool], folder: Path) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while not what():
        if time.monotonic() > until:
            logs = sorted((folder / "launch").glob("*/logs/**/*.*"))
            pytest.fail("\n".join(f"{path}:\n{path.read_text()[-1500:]}" for path in logs))
        time.sleep(0.5)


def weights(folder: Path) -> dict[str, bytes]:
    """Chunk of a tensor → its bytes, of the last checkpoint."""
    newest = sorted((folder / "train" / "checkpoints").glob("step_????????"))[-1]
    return {
        key: value.tobytes()
        for file in sorted(newest.glob("rank_*.safetensors"))
        for key, value in load_file(file).items()
    }


def test_a_chain_ends_like_an_undisturbed_run(place) -> None:
    """One job is told to stop, one loses a rank to kill -9, one finishes: the same bits as at once.

    The jobs that are left over are cancelled.
    """
    folder = packed("chained")
    shutil.copytree(folder, "undisturbed/runs/chained")
    for name in ("my_text.txt", "card.toml"):
        shutil.copy(name, "undisturbed")
    assert (
        main(["launch", str(folder), "--nodes", "2", "--jobs", "5", "--hours", "0.15", "--grace", "60"]) == 0
    )
    launch = folder / "launch" / "0001"
    metrics, first = folder / "train" / "metrics.jsonl", (launch / "chain" / "jobs").read_text().split()[0]
    wait_for(lambda: metrics.exists() and '"step": 3,' in metrics.read_text(), folder)
    subprocess.run(["scancel", "--signal=USR1", first], check=True)
    attempts = launch / "chain" / "attempts"
    wait_for(lambda: "\trequeue\t" in attempts.read_text(), folder)
    wait_for(lambda: '"step": 13,' in metrics.read_text(), folder)
    ranks = [
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdecimal() and is_rank(process, place)
    ]
    assert len(ranks) == 2
    subprocess.run(["kill", "-KILL", str(ranks[1])], check=True)
    wait_for(lambda: (launch / "chain" / "stopped").exists(), folder)
    assert (launch / "chain" / "stopped").read_text() == "finished\n"
    outcomes = re.findall(r"^end\t.*?\t.*?\t.*?\t.*?\t(\w+)", attempts.read_text(), re.MULTILINE)
    assert outcomes == ["requeue", "failed", "finished"]
    assert (launch / "chain" / "failed_nodes").read_text().startswith("kielo")
    wait_for(lambda: not subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout, folder)
    with contextlib.chdir("undisturbed"):
        command = [sys.executable, "-m", "kielo", "train", "runs/chained", "--ranks", "2"]
        subprocess.run(command, check=True, timeout=LIMIT_SECONDS)
    assert weights(folder) == weights(Path("undisturbed") / folder)


def is_rank(process: Path, place: Path) -> bool:
    """Is it a `kielo train` of this test's folder?"""
    with contextlib.suppress(OSError):
        words = (process / "cmdline").read_bytes().decode().split("\0")
        return "train" in words and (process / "cwd").resolve() == place and "python" in words[0]
    return False


def test_what_sbatch_refuses_is_passed_on(place, capsys) -> None:
    """More nodes than the scheduler has, which the card says that it has: nothing is queued."""
    folder = packed("refused")
    (place / "card.toml").write_text(CARD.replace("nodes = 4\n", "nodes = 8\n", 1))
    capsys.readouterr()
    command = [sys.executable, "-m", "kielo", "launch", str(folder), "--nodes", "8", "--hours", "0.1"]
    told = subprocess.run(command, capture_output=True, text=True)
    assert (
        told.returncode == 1 and "sbatch refused the job, and nothing is queued: sbatch: error" in told.stderr
    )
    assert not subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout
