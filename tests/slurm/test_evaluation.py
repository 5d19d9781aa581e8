"""An evaluation of a run as a chain of jobs on a real Slurm of four nodes: `make test-slurm`."""

import json
import os
import signal
from pathlib import Path

import pytest

from kielo.artifact.score_history import read_history
from kielo.artifact.scores import Scores
from kielo.artifact.stage_json import read_stage_json
from kielo.cli.main import main
from kielo.launch.status import status
from tests.slurm.jobs import TWO_NODES, queue
from tests.slurm.launched_run import NAME, STEPS, LaunchedRun, run_kielo
from tests.slurm.one_machine import Machine, processes, why_not

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(why_not()), reason=why_not())]
pytest.importorskip("lm_eval")


def write_tasks(folder: Path) -> None:
    """Two own tasks of one question each."""
    folder.mkdir()
    line = {"question": "Mikä on pääkaupunki?", "choices": ["Turku", "Helsinki"], "answer": "Helsinki"}
    (folder / "questions.jsonl").write_text(json.dumps(line))
    for name in ("first", "second"):
        text = f'name = "{name}"\nkind = "multiple_choice"\nquestions = "questions.jsonl"\n'
        (folder / f"{name}.toml").write_text(text)


def ranks_of(run: LaunchedRun) -> list[int]:
    found = processes(run.of_scheduler).items()
    return [pid for pid, words in found if {"kielo", "evaluate"} <= set(words) and "python" in words[0]]


def test_an_evaluation_continues_in_the_next_job(machine: Machine, run: LaunchedRun, capsys) -> None:
    """After a job that is asked to stop. A task that is scored already is not asked again.

    A watch then scores what is left, and ends, because the run has finished.
    """
    run_kielo(["train", f"runs/{NAME}", "--ranks", "2"], run.place)
    write_tasks(run.place / "own")
    sets = ["--set", 'evaluate.task_folders=["own"]', "--set", 'evaluate.tasks=["first","second"]']
    run_kielo(["evaluate", f"runs/{NAME}", *sets, "--tasks", "first"], run.place)
    results = run.folder / "evaluate_tasks" / f"step_{STEPS:08d}"
    (first,) = results.glob("first-*/manifest.json")
    written_at = first.stat().st_mtime_ns
    of = run.folder / "launch/evaluate_0001"
    assert main(["launch", f"runs/{NAME}", *TWO_NODES, *sets, "--jobs", "3", "--evaluate"]) == 0
    job, second, third = status(of).ids
    run.wait(lambda: len(ranks_of(run)) == 2)
    for pid in ranks_of(run):
        os.kill(pid, signal.SIGSTOP)
    assert main(["launch", f"runs/{NAME}", *TWO_NODES, *sets, "--evaluate"]) == 1
    assert f"jobs of this work are in the queue already ({job} RUNNING" in capsys.readouterr().err
    machine.ask("scancel", "--signal=USR1", job)  # as Slurm does before the end of its time
    for pid in ranks_of(run):
        os.kill(pid, signal.SIGCONT)
    run.wait(lambda: status(of).stopped != "")
    assert status(of).stopped == "finished"
    assert [(one.job, one.outcome) for one in status(of).attempts] == [(job, "requeue"), (second, "finished")]
    run.wait(lambda: queue(machine) == {})
    assert first.stat().st_mtime_ns == written_at and len([*results.glob("second-*/manifest.json")]) == 1
    scores = read_stage_json(run.folder / "evaluate", Scores)
    assert {one.task for one in scores.tasks} == {"first", "second"} and scores.unscored_tasks == {}
    assert main(["launch", f"runs/{NAME}", *TWO_NODES, *sets, "--evaluate", "--watch"]) == 0
    watch = run.folder / "launch/watch_0001"
    run.wait(lambda: status(watch).stopped != "")
    assert status(watch).stopped == "finished"
    (row,) = read_history(run.folder)
    assert row.step == STEPS and row.scores.tasks == scores.tasks
    assert row.scores.bits_per_byte.model == pytest.approx(scores.bits_per_byte.model, rel=1e-6)
    capsys.readouterr()
    assert main(["status", str(run.folder / "launch/evaluate_0001")]) == 0
    assert f"of step_{STEPS:08d}, tasks first, second; all scored" in capsys.readouterr().out
