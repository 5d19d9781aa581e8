"""The watch of a run's checkpoints: each scored once, whatever ends, vanishes or fills up."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from kielo.artifact.attempt_files import Beginning, End, append
from kielo.artifact.checkpoint_marks import EXPIRY_SECONDS
from kielo.artifact.lease import held
from kielo.artifact.score_history import ScoredCheckpoint, read_history
from kielo.artifact.scores import BitsPerByte, Scores
from kielo.checkpoint.publish import prune
from kielo.evaluate import watch_run
from kielo.evaluate.history_subject import Subject
from kielo.evaluate.watch_run import Watch
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.stages.results import evaluate
from kielo.stages.watch_checkpoints import checkpoint_scorer, watch_of
from tests.evaluate import test_run

RECIPE = Recipe.model_validate(
    {"name": "tiny", "language": "et", "corpus": {"sources": [{"name": "help", "path": "help.txt"}]}}
)
WITHOUT_A_TASK = Scores(
    model="m", bits_per_byte=BitsPerByte(model=1.5), samples=[], sampling={}, heldout_bytes=1,
    heldout_documents=1, heldout_tokens=1, sequence_length=8, stride=4, convention="",
    heldout_documents_in_all=1, training_bytes=0, training_bytes_of_byte_baselines=0, ngram_order=6,
    unscored_tasks={"b": "no data"},
)  # fmt: skip
run_folder = test_run.run_folder  # of a run that the real rooms made


def inputs_of(recipe: Recipe, run: Path, subject: Subject) -> dict[str, str]:
    return {"checkpoint": (subject.path / "weights").read_text()}


def made_score(recipe: Recipe, run: Path, subject: Subject) -> ScoredCheckpoint:
    step = int(subject.name.partition("_")[2])
    when = {"scored_at": "2026-11-28T00:00:00+00:00", "seconds": 1.0}
    inputs = inputs_of(recipe, run, subject)
    return ScoredCheckpoint(step=step, tokens=10 * step, model=subject.name, inputs=inputs, **when)


class Watched:
    """A run with checkpoints, and what its watch told. `watch` makes a new one, as after a restart."""

    def __init__(self, folder: Path):
        self.run, self.told, self.shown = folder / "run", [], []
        self.checkpoints = self.run / "train" / "checkpoints"
        self.checkpoints.mkdir(parents=True)

    def save(self, step: int, weights: str = "first") -> Path:
        path = self.checkpoints / f"step_{step:08d}"
        path.mkdir()
        (path / "weights").write_text(f"{step} {weights}")
        return path

    def watch(self, score=made_score) -> Watch:
        show = lambda row: self.shown.append(row.step)  # noqa: E731
        return Watch(RECIPE, self.run, show, self.told.append, score, look_seconds=0.01)

    @property
    def written(self) -> list[int]:
        return [row.step for row in read_history(self.run)]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(watch_run, "inputs_of", inputs_of)
    return Watched(tmp_path)


def ended(outcome: str, step: int) -> End:
    return End(ended_at="2026-11-28T00:00:00+00:00", outcome=outcome, step=step, message="")


def test_each_checkpoint_is_scored_once_beside_a_training(watched: Watched) -> None:
    """Oldest first, while the training holds the lease; again only if it is another checkpoint."""
    watched.save(200)
    watched.save(100)
    (watched.checkpoints / "step_00000300.0123456789abcdef.partial").mkdir()  # being written
    with held(watched.run):
        watched.watch().run(is_once=True)
        assert watched.written == watched.shown == [100, 200]
        watched.watch().run(is_once=True)
        assert watched.written == [100, 200]
        watched.save(300)
        (watched.checkpoints / "step_00000100" / "weights").write_text("after the run went back")
        watched.watch().run(is_once=True)
    assert watched.written == [100, 200, 100, 300]
    assert watched.told[-1].startswith("looked once: 2 scored now")
    assert list(watched.checkpoints.glob("*.in_use")) == []
    assert sorted(path.name for path in (watched.run / "watch").iterdir()) == ["ended", "history.jsonl"]


def test_the_watch_ends_with_its_run(watched: Watched) -> None:
    """A failed attempt is told, and waited out: the next attempt's checkpoint is scored too."""
    train = watched.run / "train"
    watched.save(100)
    append(train, ended("failed", 120))

    def score(recipe: Recipe, run: Path, subject: Subject) -> ScoredCheckpoint:
        if subject.name == "step_00000200":  # saved during the last look: none is missed
            append(train, ended("finished", 300))
            watched.save(300)
        return made_score(recipe, run, subject)

    watch = watched.watch(score)
    tell = watched.told.append

    def next_attempt(text: str) -> None:
        tell(text)
        if "waiting for its next attempt" in text:
            begin = {"began_at": "2026-11-28T00:00:00+00:00", "from_step": 100, "ranks": 1, "hosts": []}
            more = {"versions": {}, "seen_step": None, "seen_at": None, "changes": []}
            append(train, Beginning(**begin, **more))
            watched.save(200)

    watch.tell = next_attempt
    watch.run()
    assert watched.written == [100, 200, 300]
    assert watched.told[0] == "training stopped at step 120 (failed); waiting for its next attempt"
    assert watched.told[1].startswith("the run has finished: 3 scored now, in ") and len(watched.told) == 2


def test_a_checkpoint_that_fails_is_passed_over_by_name(watched: Watched) -> None:
    """One is pruned while it is read, one is damaged: the rest is scored. A restart tries the damaged one."""
    for step in (100, 200, 300):
        watched.save(step)

    def score(recipe: Recipe, run: Path, subject: Subject) -> ScoredCheckpoint:
        if subject.name == "step_00000100":
            (subject.path / "weights").unlink()
            subject.path.rmdir()
            raise KieloError("rank_00000.safetensors is missing")
        if subject.name == "step_00000200":
            raise KieloError("is damaged: index.json is missing")
        return made_score(recipe, run, subject)

    watch, ended = watched.watch(score), watched.run / "watch" / "ended"
    watch.run(is_once=True)
    assert watched.written == [300]
    assert watched.told[:2] == [
        "step_00000100: passed over: it vanished while it was read",
        "step_00000200: passed over: is damaged: index.json is missing",
    ]
    assert watched.told[2].startswith("looked once: 1 scored now, 1 passed over, in ")
    assert watch.passed_over == ["step_00000200: is damaged: index.json is missing"]
    assert ended.read_text() == "step_00000200: is damaged: index.json is missing\n"
    watched.watch().run(is_once=True)
    assert watched.written == [300, 200] and ended.read_text() == ""


def test_a_task_without_a_score_is_tried_again_by_the_next_watch(watched: Watched) -> None:
    """A row that lacks a task is followed by a complete row, and that is the last."""
    watched.save(100)
    (watched.run / "watch").mkdir()

    def lacking(*given) -> ScoredCheckpoint:
        return made_score(*given).model_copy(update={"scores": WITHOUT_A_TASK})

    watch = watched.watch(lacking)
    watch.look()
    watch.look()
    assert (watched.written, watch.scored, watch.without_task) == ([100], 1, 1)
    watch = watched.watch()
    watch.look()
    assert (watched.written, watch.scored, watch.without_task) == ([100, 100], 1, 0)
    watched.watch().look()
    assert watched.written == [100, 100]


def test_a_base_model_of_megatron_is_told_once(watched: Watched, tmp_path: Path) -> None:
    """Its folder here would be refused, because it has no weights."""
    watched.save(100)
    (watched.run / "watch").mkdir()
    watch, name = watched.watch(), f"megatron:{tmp_path}"
    model = RECIPE.model.model_copy(update={"weights": name})
    watch.recipe = RECIPE.model_copy(update={"model": model})
    watch.look()
    watch.look()
    assert watched.told == [f"{name}: a checkpoint of Megatron, so the base model is not scored"]
    assert watched.written == [100]


def test_a_scoring_leaves_stdout_to_the_rows(watched: Watched, capsys, monkeypatch) -> None:
    monkeypatch.setattr("kielo.evaluate.score_alone.score_alone", lambda *given: print("task b"))
    checkpoint_scorer(RECIPE, watched.run)(Subject("step_00000100", watched.run))
    assert capsys.readouterr() == ("", "task b\n")


def test_a_full_disk_loses_no_score(watched: Watched, monkeypatch) -> None:
    """The rows wait in the watch, and are written when there is room."""
    watched.save(100)
    (watched.run / "watch").mkdir()
    append_line, full = watch_run.append_line, OSError(errno.ENOSPC, "No space left on device", "history")
    monkeypatch.setattr(watch_run, "append_line", lambda *_: (_ for _ in ()).throw(full))
    watch = watched.watch()
    watch.look()
    assert watched.shown == [100] and watched.written == []
    assert watched.told == [
        "scores were not written, and are tried again: history: No space left on device; free some space, "
        "then run the same command to resume"
    ]
    watch.look()
    monkeypatch.setattr(watch_run, "append_line", append_line)
    watch.look()
    assert watched.shown == watched.written == [100] and len(watched.told) == 1


KILLED = """
import sys, time
from functools import partial
from pathlib import Path
from kielo.evaluate import watch_run
from tests.evaluate.test_watch_run import RECIPE, inputs_of, made_score

def score(recipe, run, subject):
    if subject.name == "step_00000200":
        print("scoring", flush=True)
        time.sleep(600)
    return made_score(recipe, run, subject)

watch_run.inputs_of = inputs_of
watch_run.Watch(RECIPE, Path(sys.argv[1]), lambda row: None, print, score).run()
"""


@pytest.mark.full
def test_a_killed_watch_goes_on_and_keeps_nothing_for_ever(watched: Watched) -> None:
    """SIGKILL while it scores. Its mark keeps the checkpoint for a while and no longer."""
    paths = [watched.save(step) for step in (100, 200, 300, 400)]
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(watched.run)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "scoring\n"
        with pytest.raises(KieloError, match=f"another job works in this folder: process {process.pid} "):
            watched.watch().run(is_once=True)
        process.send_signal(signal.SIGKILL)
    prune(paths[-1], keep_newest=2, keep_every_steps=0)
    assert [path.exists() for path in paths] == [False, True, True, True]
    watched.watch().run(is_once=True)
    assert watched.written == [100, 200, 300, 400] and watched.shown == [200, 300, 400]
    (mark,) = watched.checkpoints.glob("*.in_use")  # of the dead watch
    old = time.time() - EXPIRY_SECONDS - 1
    os.utime(mark, (old, old))
    prune(paths[-1], keep_newest=2, keep_every_steps=0)
    assert not paths[1].exists() and not mark.exists()


def killed_scorer(recipe: Recipe, run: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_scoring_that_is_killed_ends_alone(watched: Watched) -> None:
    """Its process has no memory left: the reason is told, and the next checkpoint is scored."""

    watched.save(100)
    watched.watch(partial(watch_run.score_in_process, killed_scorer)).look()
    assert watched.told[0].startswith(
        "step_00000100: passed over: its process ended without scores (exit code -9); -9 is mostly the kernel"
    )


@pytest.mark.full
def test_the_scores_of_a_watch_are_those_of_the_stage(run_folder: Path, capfd) -> None:
    """In a process of its own, without baselines and without a change of the evaluate stage's folder."""
    shown: list[ScoredCheckpoint] = []
    watch_of(test_run.RECIPE, run_folder, shown.append, print).run(is_once=True)
    assert not (run_folder / "evaluate").exists()
    stage = evaluate(test_run.RECIPE, run_folder)
    (row,) = read_history(run_folder)
    assert row == shown[0] and (row.step, row.model, row.is_base) == (8, "step_00000008", False)
    assert row.scores.bits_per_byte.content() == {"model": pytest.approx(stage.bits_per_byte.model, rel=1e-6)}
    assert row.scores.samples == stage.samples and row.scores.heldout_bytes == stage.heldout_bytes
    line = (run_folder / "watch" / "history.jsonl").read_text(encoding="utf-8")
    assert json.loads(line)["inputs"].keys() >= {"checkpoint", "tokenizer", "tokens", "settings"}
