"""A chain of jobs on a real Grid Engine of one node: `make test-slurm`."""

import shutil
from pathlib import Path

import pytest

from kielo.cli.main import main
from tests.slurm.grid_engine_machine import GridEngine, grid_engine, why_not
from tests.slurm.launched_run import NAME, LaunchedRun, pack, train_undisturbed, weights

CARD = """\
scheduler = "grid_engine"

[jobs]
partitions = [{ name = "node_f" }]
options = ["-pe nodes 1"]
setup = ["export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]

[jobs.sources]
partitions = "tests"
options = "tests"
setup = "tests"
"""

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    with grid_engine(tmp_path_factory.mktemp("grid_engine") / "cell") as machine:
        yield machine


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """A folder with the text, the card, and the run with its tokens."""
    return pack(tmp_path_factory.mktemp("packed"), "grid_engine.toml", CARD)


@pytest.fixture
def run(machine, packed, tmp_path, monkeypatch):
    """The packed run in the current folder, and an empty queue after it."""
    place = tmp_path / "place"
    shutil.copytree(packed, place)
    monkeypatch.chdir(place)
    for name, value in machine.environment.items():
        if name.startswith("SGE_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = LaunchedRun(place, machine.own)
    try:
        yield run
    finally:
        if left := queue(machine):
            machine.ask("qdel", *left)
        run.wait(lambda: queue(machine) == {})


def queue(machine: GridEngine) -> dict[str, str]:
    """Job → state."""
    return {line.split()[0]: line.split()[4] for line in machine.ask("qstat").splitlines()[2:]}


def test_a_chain_is_submitted_cancelled_and_finished(machine, run, packed, tmp_path, capsys) -> None:
    """`kielo cancel` has the job that runs save and stop; jobs added after it finish with the same bits."""
    flags = ["--nodes", "1", "--hours", "0.5", "--grace", "60", "--jobs", "3"]
    assert main(["launch", f"runs/{NAME}", *flags]) == 0
    first, second, third = run.ids
    run.wait(lambda: queue(machine).get(first) == "r")
    assert queue(machine) == {first: "r", second: "hqw", third: "hqw"}
    frozen_at = run.freeze(first, ranks=1)
    capsys.readouterr()
    assert main(["status", str(run.folder)]) == 0
    assert f"jobs\t{first} r; {second} hqw; {third} hqw (3 submitted)" in capsys.readouterr().out
    assert main(["launch", f"runs/{NAME}", "--nodes", "1"]) == 1
    assert f"are in the queue already ({first} r, {second} hqw" in capsys.readouterr().err
    assert main(["cancel", str(run.folder)]) == 0
    assert "the running job saves and stops" in capsys.readouterr().out
    run.wait(run.was_signalled)
    run.wake()
    run.wait(lambda: queue(machine) == {})
    assert run.outcomes == ["requeue"] and run.stopped == "cancelled by kielo cancel"
    assert frozen_at <= run.newest_step <= frozen_at + 1
    (run.launch / "chain" / "stopped").unlink()
    submitted = machine.ask("bash", str(run.launch / "submit.sh"), "2").split()
    run.wait(lambda: run.stopped != "" and queue(machine) == {})
    assert run.stopped == "finished" and run.outcomes == ["requeue", "finished"]
    assert [attempt.job for attempt in run.attempts] == [first, submitted[0]]
    assert [path.name[-10:] for path in (run.launch / "logs" / f"{first}.0").glob("*.log")] == [".00000.log"]
    assert weights(run.folder) == train_undisturbed(packed, tmp_path / "undisturbed", 1)


def test_what_qsub_refuses_is_passed_on(machine, run, capsys) -> None:
    """A type of node that the scheduler does not know: one line, and nothing is queued."""
    card = (run.place / "grid_engine.toml").read_text()
    (run.place / "unknown_node.toml").write_text(card.replace('name = "node_f"', 'name = "node_x"'))
    capsys.readouterr()
    assert (
        main(["launch", f"runs/{NAME}", "--cluster", "unknown_node.toml", "--nodes", "1", "--hours", "0.5"])
        == 1
    )
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and 'unknown resource "node_x"' in said
    assert "qsub refused the job, and nothing is queued" in said and queue(machine) == {}
