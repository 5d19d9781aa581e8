"""Jobs that evaluate: their scripts, what follows an attempt, and what is refused."""

import contextlib
import json
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kielo.artifact.attempt_files import Refusal
from kielo.artifact.launch_files import Launch
from kielo.artifact.manifest import hash_manifest, write_stage
from kielo.artifact.scores import BitsPerByte, Scores
from kielo.artifact.stage_json import read_json, write_json
from kielo.artifact.task_result import TaskResult
from kielo.cli.main import main
from kielo.launch.decide_evaluation import decide
from kielo.launch.evaluation_jobs import check_evaluation, plan_evaluation, scored_in_words
from kielo.launch.job_paths import job_paths
from kielo.launch.job_plan import JobPlan, Wishes
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from tests.launch.test_chain import STUBS, Chain

FLAGS = ["--cluster", "karolina", "--nodes", "2", "--account", "open-00-00", "--hours", "2", "--dry-run"]
TASKS = ["--set", 'evaluate.tasks=["xcopa_et"]']


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with jobs that score the newest checkpoint, and jobs that watch."""
    folder = tmp_path_factory.mktemp("jobs")
    with contextlib.chdir(folder):
        for more in ([], ["--watch"]):
            assert main(["launch", "viking_7b", *FLAGS, *TASKS, "--evaluate", *more]) == 0
    for work in ("evaluate", "watch"):
        launch = folder / f"runs/viking_7b/launch/{work}_0001"
        with open(launch / "environment.sh", "a") as environment:
            environment.write("PYTHON=(true) KIELO=(true)\n")
    return folder


class Evaluation(Chain):
    """Its launch folder and run, with a checkpoint. Without a scheduler's jobs but of this launch."""

    def __init__(self, written: Path, folder: Path, work: str = "evaluate"):
        (written / "runs/viking_7b/launch/0001/chain").mkdir(parents=True, exist_ok=True)
        super().__init__(written, folder)
        self.folder = self.run / f"launch/{work}_0001"
        (self.folder / "chain/jobs").write_text("7\n8\n9\n")
        self.newest = self.run / "train/checkpoints/step_00000040"
        with write_stage(self.newest, "checkpoint", 1, {}, {}):
            pass

    def scores(self, unscored: dict[str, str], model: str = "step_00000040") -> None:
        scores = Scores(
            model=model, bits_per_byte=BitsPerByte(model=1.25), samples=[], sampling={}, heldout_bytes=1,
            heldout_documents=1, heldout_tokens=1, sequence_length=8, stride=4, convention="",
            heldout_documents_in_all=1, training_bytes=0, training_bytes_of_byte_baselines=0, ngram_order=6,
            unscored_tasks=unscored,
        )  # fmt: skip
        inputs = {"checkpoint": hash_manifest(self.newest) if model == self.newest.name else "another"}
        with write_stage(self.run / "evaluate", "scores", 3, inputs, {"tasks": [*unscored]}) as stage:
            write_json(stage.folder, scores)


@pytest.mark.parametrize(("work", "flag"), [("evaluate", ""), ("watch", " --watch")])
def test_the_scripts_evaluate(written: Path, work: str, flag: str) -> None:
    """Each rank starts kielo evaluate, and the job is judged by that."""
    folder = written / f"runs/viking_7b/launch/{work}_0001"
    for file in sorted(folder.glob("*.sh")):
        subprocess.run(["bash", "-n", file], check=True)
    environment, job = ((folder / name).read_text() for name in ("environment.sh", "job.sh"))
    assert f'COMMAND=(evaluate "$FOLDER/recipe.toml"{flag}) ' in environment
    assert "-m kielo.launch.decide_evaluation)\n" in environment
    assert f"\nWORK={work}\n" in job and f"#SBATCH --job-name=viking_7b_{work}\n" in job
    assert "#SBATCH --nodes=2\n" in job and "#SBATCH --time=02:00:00\n" in job
    assert "#SBATCH --signal=USR1@60\n" in job and "JOBS=3\n" in (folder / "submit.sh").read_text()
    launch = read_json(folder, Launch)
    assert (launch.work, launch.job_name, launch.jobs) == (work, f"viking_7b_{work}", 3)


TIME_IS_OVER = "its time ended. What was scored stays, and the next job continues"
WITHOUT = "no score of xcopa_et: no data"


def of_attempt(launch: Path, job: str = "7") -> Path:
    attempt = launch / "logs" / f"{job}.0"
    attempt.mkdir(parents=True, exist_ok=True)
    (attempt / "meeting.sh").write_text("")
    return attempt


def test_an_attempt_is_judged_by_its_scores(written: Path, tmp_path: Path) -> None:
    """Not by the training's outcome, which another job writes."""
    of = Evaluation(written, tmp_path)
    (of.run / "train/outcome.json").write_text(json.dumps({"outcome": "failed", "message": "loss"}))

    def judged(code: int, refusal: str = "") -> tuple[str, str, str]:
        found = decide(of.folder, attempt, code, refusal)
        return found.outcome, found.reason, found.ends

    of.scores({}, model="step_00000020")  # by an earlier job
    attempt = of_attempt(of.folder)
    without = f"the ranks ended with exit code 0 and without scores; the first error is in {attempt}"
    assert judged(0) == ("failed", without, "")
    assert judged(0, "no nodes") == ("failed", "no nodes", "")
    assert judged(128 + signal.SIGUSR1) == ("requeue", TIME_IS_OVER, "")
    for code in (137, 128 + signal.SIGTERM, 128 + signal.SIGINT):  # srun ends the others with SIGTERM
        assert judged(code)[::2] == ("failed", "")
    (attempt / "asked").touch()
    assert judged(128 + signal.SIGTERM) == ("requeue", TIME_IS_OVER, "")
    (attempt / "asked").unlink()
    refused = Refusal(message="evaluate.tasks: lm-eval is not installed")
    (attempt / "refusal.txt").write_text(json.dumps(refused.content()))
    for code in (1, 128 + signal.SIGTERM):
        assert judged(code) == ("failed", refused.message, "")
    start, end = "start\t7\t0\t2\t100\t3 results\t", f"end\t7\t0\t2\t160\tfailed\t{refused.message}"
    (of.folder / "chain/attempts").write_text("\n".join([start, end, start.replace("100", "9999999999"), ""]))
    assert judged(1) == ("failed", refused.message, f"twice the same: {refused.message}")
    (attempt / "refusal.txt").unlink()
    of.scores({"xcopa_et": "no data"})
    assert judged(1) == ("finished", WITHOUT, f"finished, {WITHOUT}")
    of.scores({})
    assert judged(0) == ("finished", "", "finished")
    attempt = of_attempt(of.folder, "8")  # of the same checkpoint, whose scores are current
    assert judged(0) == ("finished", "", "finished")


def test_a_chain_of_evaluations_continues_and_ends(written: Path, tmp_path: Path, capsys: Any) -> None:
    """After a job whose time ended. `kielo status` says what is scored."""
    of = Evaluation(written, tmp_path)
    assert of.job("exit 138") == 0 and not of.stopped and not of.cancelled.exists()
    assert of.attempts[-1].split("\t")[5:] == ["requeue", TIME_IS_OVER]
    with open(of.stubs / "scontrol", "a") as scontrol:
        scontrol.write(
            '[ "$1" != --oneliner ] || echo " JobState=RUNNING Reason=None PreemptTime=2026-11-28T00:00:00"\n'
        )
    assert of.job("exit 143") == 0 and of.attempts[-1].split("\t")[5:] == ["requeue", TIME_IS_OVER]
    (of.stubs / "scontrol").write_text("#!/bin/bash\n" + STUBS["scontrol"])
    of.scores({})
    assert of.job("touch {run}/evaluate/manifest.json; exit 0", "8") == 0
    assert of.stopped == "finished" and of.cancelled.read_text().split()[2:] == ["9"]
    assert of.attempts[-1].split("\t")[5] == "finished"
    for folder in (of.folder, of.run):
        (of.run / "launch/0001/launch.json").write_text((of.folder / "launch.json").read_text().replace(
            '"work": "evaluate"', '"work": "train"'
        ))  # fmt: skip
        assert main(["status", str(folder)]) == 0
        said = capsys.readouterr().out
        assert "no task of step_00000040 yet; all scored, bits per byte 1.250" in said
        assert ("scored\t" in said) == (folder == of.folder) and "ended: finished" in said


def test_status_shows_no_scores_of_another_launch_or_checkpoint(written: Path, tmp_path: Path) -> None:
    """Older scores can have other settings. A chain that took them over says so at its end."""
    of, none = Evaluation(written, tmp_path), "no task of step_00000040 yet"
    launch = of.folder / "launch.json"
    later = re.sub(r'"created_at": "[^"]*"', '"created_at": "2126-01-01T00:00:00+00:00"', launch.read_text())
    inputs = {"checkpoint": hash_manifest(of.newest)}
    result = TaskResult(task="first", metrics={}, version="1", questions=1, shots=0)

    def said() -> str:
        return scored_in_words(of.folder, "evaluate")

    for scored in ({"checkpoint": "of another save of this step"}, inputs):
        with write_stage(of.run / "evaluate_tasks/step_00000040/first-1", "task", 1, scored, {}) as stage:
            write_json(stage.folder, result)
        of.scores({}, "step_00000040" if scored == inputs else "another")
        every = "of step_00000040, tasks first; all scored, bits per byte 1.250"
        assert said() == (every if scored == inputs else none)
    launch.write_text(later)
    assert said() == none
    (of.folder / "chain/stopped").write_text("finished\n")
    assert said() == every


@pytest.mark.parametrize(("outcome", "code"), [("requeue", 138), ("failed", 1)])
def test_a_watch_may_wait_for_more_than_three_jobs(
    written: Path, tmp_path: Path, outcome: str, code: int
) -> None:
    """A job whose time ended does not count as an attempt without a new result. A failure counts."""
    of = Evaluation(written, tmp_path, "watch")
    lines = ["start\t5\t0\t2\t9\t0 results\t", f"end\t5\t0\t2\t10\t{outcome}\twhy"]
    (of.folder / "chain/attempts").write_text("\n".join([*lines * 3, ""]))
    assert of.job(f"exit {code}") == (0 if outcome == "requeue" else 1)
    ended = "" if outcome == "requeue" else "3 attempts in a row made nothing after 0 results; the last: why"
    assert of.stopped == ended


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--watch"], "--watch: scores checkpoints. Fix: --evaluate --watch"),
        (["--evaluate", "--ladder", "1"], "--evaluate: a ladder only trains"),
        (["--evaluate", "--hours", "0.02"], "--hours 0.02: a job stops 60 s before its end. Fix: --hours 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    flags: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "viking_7b", *FLAGS, *flags]) == 1
    assert told in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_jobs_that_would_end_at_once_are_refused(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without data of a task, held-out text or a checkpoint, and beside jobs of the training or the same."""
    of = Evaluation(written, tmp_path)
    monkeypatch.chdir(tmp_path)
    brought = {"kind": "task", "name": "belebele_est_Latn", "origin": "", "folder": "", "bytes": 1}
    (tmp_path / "prefetched.json").write_text(json.dumps({"brought": [brought], "made_at": ""}))
    monkeypatch.setenv("KIELO_PREFETCHED", str(tmp_path))
    recipe = read_recipe("viking_7b", ["cluster=karolina", 'evaluate.tasks=["xcopa_et","belebele_est_Latn"]'])
    wishes = Wishes(nodes=2, account="open-00-00", hours=2.0)
    plan, watch = (plan_evaluation(recipe.recipe, wishes, work) for work in ("evaluate", "watch"))
    assert {path.path: path.use for path in job_paths(plan)}[str(tmp_path)] == "writes"
    site = plan.site.model_copy(update={"internet_on_compute_nodes": False})

    def refused(plan: JobPlan, told: str) -> None:
        with pytest.raises(KieloError, match=told):
            check_evaluation(plan)

    refused(replace(plan, site=site), "not here yet: the data of the task xcopa_et. Fix: kielo prefetch")
    refused(plan, "tokens: not made yet, and has the held-out text")
    with write_stage(of.run / "tokens", "tokens", 1, {}, {}):
        pass
    text = (of.folder / "launch.json").read_text()
    (of.run / "launch/0001/launch.json").write_text(text.replace('"work": "evaluate"', '"work": "train"'))
    (of.run / "launch/0001/chain").mkdir(exist_ok=True)
    (of.run / "launch/0001/chain/jobs").write_text("5\n")
    queue = {"5": "RUNNING None"}
    found = lambda scheduler, ids: {job: queue[job] for job in ids if job in queue}  # noqa: E731
    monkeypatch.setattr("kielo.launch.evaluation_jobs.states", found)
    refused(plan, r"0001: its jobs train this run \(5 RUNNING\), and hold its lease. Fix: --watch")
    queue.clear()
    queue["8"] = "PENDING Dependency"
    refused(plan, r"evaluate_0001: jobs of this work are in the queue already \(8 PENDING\)")
    of.newest.rename(of.newest.with_name("another"))
    refused(plan, "no checkpoint yet. Fix: --watch, whose jobs wait for the first")
    (of.run / "launch/watch_0001/chain/jobs").write_text("8\n")
    refused(watch, r"watch_0001: jobs of this work are in the queue already")


def test_a_watch_is_judged_by_its_history(written: Path, tmp_path: Path) -> None:
    """It ends its chain only if it came to its end, passed nothing over and scored the newest checkpoint."""
    of = Evaluation(written, tmp_path, "watch")
    attempt, history, ended = of_attempt(of.folder), of.run / "watch/history.jsonl", of.run / "watch/ended"
    of.scores({"xcopa_et": "no data"})
    lacking = json.loads((of.run / "evaluate/scores.json").read_text())

    def row(step: int, scored_at: str, unscored: dict[str, str]) -> str:
        when = {"tokens": 9, "inputs": {}, "seconds": 1.0, "scored_at": scored_at}
        scores = {**lacking, "unscored_tasks": unscored}
        return json.dumps({"step": step, "model": f"step_{step:08d}", **when, "scores": scores}) + "\n"

    def judged(code: int) -> tuple[str, str, str]:
        found = decide(of.folder, attempt, code)
        return found.outcome, found.reason, found.ends

    old, new = "2026-01-01T00:00:00+00:00", "2126-01-01T00:00:00+00:00"
    history.parent.mkdir()
    history.write_text(row(40, new, {"xcopa_et": "no data"}))
    for code in (0, 1):  # it crashed, or was interrupted
        assert judged(code)[::2] == ("failed", "") and "without scores" in judged(code)[1]
    ended.write_text("")
    for code in (0, 1):
        assert judged(code) == ("finished", WITHOUT, f"finished, {WITHOUT}")
    assert judged(134)[::2] == ("failed", "")
    history.write_text(row(20, old, {"a": "it was pruned"}) + row(40, new, {"b": "no"}) + row(40, new, {}))
    assert judged(0) == ("finished", "", "finished")
    history.write_text(row(20, new, {}))
    assert judged(0) == ("failed", f"{history} has no scores of step_00000040", "")
    ended.write_text("step_00000040: is damaged\n")
    assert judged(1) == ("failed", "passed over: step_00000040: is damaged", "")
