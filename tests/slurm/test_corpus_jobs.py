"""A corpus by arrays of jobs on a real Slurm of four nodes: `make test-slurm`."""

import json
from pathlib import Path

import pytest

from kielo.cli.main import main
from tests.slurm.jobs import queue
from tests.slurm.launched_run import NAME
from tests.slurm.one_machine import why_not

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.full]


def test_an_array_makes_a_corpus_though_a_job_of_it_is_cancelled(machine, run, capsys) -> None:
    """The others do its tasks; the corpus is that of one machine, and the last job has put it together."""
    words = ["launch", f"runs/{NAME}", "--set", "folder=runs/again", "--corpus", "3", "--jobs", "2"]
    assert main([*words, "--account", "granted_project", "--hours", "0.3"]) == 0
    folder = Path("runs/again/launch/corpus_0001")
    first, second, last = (folder / "chain" / "jobs").read_text().split()
    machine.tell("scancel", f"{first}_2")
    run.wait(lambda: queue(machine) == {})
    capsys.readouterr()
    assert main(["status", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["is_joined"] and shown["submitted"] == [first, second, last]
    logs = "".join(path.read_text() for path in (folder / "logs").glob("job_*.log"))
    assert "kielo corpus: 1/3 on" in logs and "kielo corpus: the rest, and the join on" in logs
    alone, shared = (Path("runs", name, "corpus", "documents") for name in (NAME, "again"))
    assert {path.name: path.read_bytes() for path in alone.iterdir()} == {
        path.name: path.read_bytes() for path in shared.iterdir()
    }
