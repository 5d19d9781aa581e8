"""The records of a run, without a training: its outcome, its manifest, its attempts, and what they refuse."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kielo.artifact.attempt_files import Beginning, Change, End, Outcome, read_attempts
from kielo.artifact.manifest import read_manifest
from kielo.artifact.metrics import HeldOutLoss, HeldOutScore, Row, TrainingStep, write_row
from kielo.artifact.stage_json import read_json
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Resolved, read
from kielo.train.records import (
    NOTHING_TO_DO,
    forget_outcome,
    has_outcome,
    is_finished,
    note_beginning,
    note_end,
    nothing_to_do,
    refuse_lost_checkpoints,
    settle,
    usual_tokens_per_second,
    wall_seconds,
    withdraw_manifest,
    write_plan,
    write_train_manifest,
)
from tests.train.saved_run import resolved_in
from tests.train.tiny_run import write_tokens


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens_of_records")
    write_tokens(folder / "tokens")
    return folder


@pytest.fixture
def resolved(tmp_path: Path, tokens: Path) -> Resolved:
    (tmp_path / "train").mkdir()
    return resolved_in(tmp_path, tokens)


def outcome_in(folder: Path, **values: Any) -> None:
    content = {"outcome": "requeue", "step": 8, "tokens": 1024, "exit_code": 75, "message": ""} | values
    (folder / "outcome.json").write_text(json.dumps(content))


def metrics_in(folder: Path, *rows: Row) -> None:
    (folder / "metrics.jsonl").write_text("".join(map(write_row, rows)))


def steps(*numbers: int) -> list[TrainingStep]:
    return [TrainingStep(step=number, loss=2.0, seconds=1.0, tokens_per_second=1.0) for number in numbers]


def test_an_outcome_is_written_and_returned(tmp_path: Path, resolved: Resolved) -> None:
    folder = tmp_path / "train"
    for what, code in (("finished", 0), ("failed", 1), ("requeue", 75), ("hung", 76)):
        assert settle(resolved, what, (9, 1152), is_writing=False).exit_code == code
    assert not has_outcome(resolved) and list(folder.iterdir()) == []
    outcome = settle(resolved, "requeue", (9, 1152), "stopped")
    expected = Outcome(outcome="requeue", step=9, tokens=1152, exit_code=75, message="stopped")
    assert outcome == expected == read_json(folder, Outcome) and has_outcome(resolved)
    assert read_attempts(folder) == []  # no attempt had begun
    forget_outcome(resolved)
    assert not has_outcome(resolved)
    forget_outcome(resolved)


def test_a_finished_run_is_asked_for_again(tmp_path: Path, resolved: Resolved) -> None:
    """The first rank writes; twenty steps of 128 tokens."""
    for is_first in (False, True):
        outcome = nothing_to_do(resolved, is_first)
        assert (outcome.outcome, outcome.step, outcome.tokens) == ("finished", 20, 2560)
        assert outcome.message == NOTHING_TO_DO
        assert has_outcome(resolved) == is_first == (tmp_path / "resolved.toml").exists()
    assert read(tmp_path / "resolved.toml") == resolved


@pytest.mark.parametrize(
    ("left", "sign"),
    [
        ({}, None),
        ({"rows": [1, 13]}, None),  # twice the six steps between two saves
        ({"rows": [1, 6, 14]}, "metrics.jsonl continues to step 14"),
        ({"rows": [10, 22]}, None),
        ({"rows": [10, 23]}, "metrics.jsonl continues to step 23"),
        ({"outcome": {}}, "outcome.json says that it stopped at step 8"),
        ({"outcome": {"outcome": "finished", "exit_code": 0}}, "outcome.json says that it stopped at step 8"),
        ({"outcome": {"step": 0}}, None),
        ({"outcome": {"outcome": "failed", "exit_code": 1}}, None),
        ({"outcome": {"step": "eight"}}, None),  # nobody can read it
        ({"folders": ["step_00000006.partial"]}, None),
        ({"folders": ["step_00000006.damaged", "other"]}, "step_00000006.damaged"),
        ({"links": ["newest"]}, "newest"),
        ({"links": ["newest"], "rows": [1, 20]}, "newest, metrics.jsonl continues to step 20"),
        ({"folders": ["step_00000004"], "rows": [1, 20]}, None),  # a checkpoint
    ],
)  # fmt: skip
def test_a_run_that_lost_its_checkpoints_does_not_begin_anew(
    tmp_path: Path, resolved: Resolved, left: dict[str, Any], sign: str | None
) -> None:
    """One that was killed before its first save may. Whatever is left says why."""
    folder, checkpoints = tmp_path / "train", tmp_path / "train" / "checkpoints"
    metrics_in(folder, *steps(*left.get("rows", ())))
    if "outcome" in left:
        outcome_in(folder, **left["outcome"])
    for name in left.get("folders", ()):
        (checkpoints / name).mkdir(parents=True)
    for name in left.get("links", ()):
        checkpoints.mkdir()
        (checkpoints / name).symlink_to("step_00000009")
    if sign is None:
        refuse_lost_checkpoints(resolved)
        return
    with pytest.raises(KieloError) as caught:
        refuse_lost_checkpoints(resolved)
    assert str(caught.value) == (
        f"{checkpoints} contains no checkpoint, but training had saved there ({sign}). Fix: put a "
        f"checkpoint back, from a backup or under its first name. To begin at step 0, move {folder} away or "
        "give the recipe another folder"
    )


def row(step: int, seconds: float, speed: float, skipped: int | None = None) -> TrainingStep:
    return TrainingStep(
        step=step, loss=3.0 - step / 10, seconds=seconds, tokens_per_second=speed, skipped=skipped
    )


def finished(folder: Path, resolved: Resolved, *rows: Row) -> Any:
    """Writes the manifest of a run with these rows and a last checkpoint; returns it."""
    checkpoint = folder / "checkpoints" / "step_00000020"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "manifest.json").write_text("the last")
    metrics_in(folder, *rows)
    return write_train_manifest(resolved, checkpoint)


def test_the_manifest_of_a_finished_run(tmp_path: Path, resolved: Resolved) -> None:
    """Its last rows, the median speed but for the first row of each attempt, the seconds of both attempts."""
    folder = tmp_path / "train"
    scores = [HeldOutScore(loss=loss, bits_per_byte=1.5, languages=["fi"]) for loss in (2.75, 2.25)]
    rows = [
        row(5, 2.0, 10.0, 1), row(8, 5.0, 70.0, 2), HeldOutLoss(step=10, heldout_loss=2.5),
        row(9, 3.0, 20.0), row(14, 4.0, 50.0, 3), row(20, 6.0, 80.0, 4),
        HeldOutLoss(step=15, heldout_loss=2.4, heldout_sets={"news": scores[0]}),
        HeldOutLoss(step=20, heldout_loss=2.3, heldout_sets={"news": scores[1]}),
    ]  # fmt: skip
    assert not is_finished(resolved)
    manifest = finished(folder, resolved, *rows)
    assert is_finished(resolved) and read_manifest(folder) == manifest
    assert (manifest.kind, manifest.version) == ("train", 1) and manifest.wall_seconds == 5.0 + 6.0
    assert manifest.inputs == {"tokens": resolved.identity.tokens_hash}
    assert manifest.counts == {
        "steps": 20, "tokens": 2560, "skipped_steps": 4, "tokens_per_second": 70.0, "loss": 1.0,
        "heldout_loss": 2.3,
        "heldout_sets": {"news": {"loss": 2.25, "bits_per_byte": 1.5, "languages": ["fi"]}},
        "ranks": 1, "parameters": 5000,
    }  # fmt: skip
    file = {"bytes": 8, "xxh3_128": xxhash.xxh3_128_hexdigest(b"the last")}
    assert manifest.content()["files"] == {"checkpoints/step_00000020/manifest.json": file}
    with pytest.raises(KieloError, match=r"manifest\.json belongs to a finished run"):
        (folder / "checkpoints" / "step_00000020" / "manifest.json").unlink()
        (folder / "checkpoints" / "step_00000020").rmdir()
        refuse_lost_checkpoints(resolved)
    rounded = finished(folder, resolved, row(20, 1.23456, 7.0))
    assert rounded.wall_seconds == 1.235 and rounded.counts["skipped_steps"] == 0


def test_a_run_that_logged_nothing_has_a_manifest_all_the_same(tmp_path: Path, resolved: Resolved) -> None:
    manifest = finished(tmp_path / "train", resolved)
    found = {name: manifest.counts[name] for name in ("skipped_steps", "tokens_per_second", "loss")}
    assert found == {"skipped_steps": 0, "tokens_per_second": None, "loss": None}
    assert manifest.counts["heldout_loss"] is None and manifest.counts["heldout_sets"] == {}
    assert manifest.wall_seconds == 0.0


def test_only_the_manifest_of_this_run_is_withdrawn(tmp_path: Path, tokens: Path, resolved: Resolved) -> None:
    finished(tmp_path / "train", resolved, *steps(20))
    withdraw_manifest(resolved_in(tmp_path, tokens, seed=4))
    assert (tmp_path / "train" / "manifest.json").exists()
    withdraw_manifest(resolved)
    assert not (tmp_path / "train" / "manifest.json").exists()
    withdraw_manifest(resolved)


def test_rows_of_one_attempt_and_of_several() -> None:
    """Each attempt counts its seconds from zero; for its speed a row must be later than the one before."""
    assert usual_tokens_per_second([]) is None and wall_seconds([]) == 0.0
    assert usual_tokens_per_second([row(1, 2.0, 7.0)]) == 7.0 and wall_seconds([row(1, 2.0, 7.0)]) == 2.0
    rows = [row(1, 2.0, 7.0), row(2, 2.0, 9.0), row(3, 2.5, 30.0)]
    assert usual_tokens_per_second(rows) == 30.0 and wall_seconds(rows) == 2.5
    assert usual_tokens_per_second(rows[:2]) == 8.0 and wall_seconds(rows[:2]) == 2.0


def test_attempts_say_what_was_seen_and_what_has_changed(
    tmp_path: Path, tokens: Path, resolved: Resolved
) -> None:
    """The first has nothing to compare with; the second sees the first's last row, and when that was."""
    folder = tmp_path / "train"
    write_plan(resolved_in(tmp_path, tokens, log_every_steps=9))
    note_beginning(resolved, 0, ["nid1", "nid2"])
    write_plan(resolved)
    metrics_in(folder, *steps(3, 7), HeldOutLoss(step=9, heldout_loss=2.0))
    os.utime(folder / "metrics.jsonl", (0, 86_400 + 3_661))
    settle(resolved, "failed", (8, 1024), "lost")
    note_end(resolved, Outcome(outcome="hung", step=9, tokens=0, exit_code=76, message="not the end"))
    note_beginning(resolved_in(tmp_path, tokens, log_every_steps=3), 6, ["nid3"])
    first, end, second = read_attempts(folder)
    assert isinstance(first, Beginning) and isinstance(second, Beginning) and isinstance(end, End)
    assert (first.from_step, first.ranks, first.hosts) == (0, 2, ["nid1", "nid2"])
    assert (first.seen_step, first.seen_at, first.changes) == (None, None, [])
    assert (end.outcome, end.step, end.message) == ("failed", 8, "lost")
    assert (second.from_step, second.ranks, second.hosts) == (6, 1, ["nid3"])
    assert (second.seen_step, second.seen_at) == (7, "1970-01-02T01:01:01+00:00")
    assert second.changes == [Change(key="train.log_every_steps", before="1", after="3")]


@pytest.mark.parametrize(("differing", "more"), [(40, 0), (41, 1), (43, 3)])
def test_so_many_changes_are_named(
    resolved: Resolved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differing: int, more: int
) -> None:
    """Forty, in the order of the keys before, then the new ones; and how many more there are."""
    before = {"same": "é", "gone": 1.5} | dict.fromkeys([f"k{number}" for number in range(differing - 2)], 0)
    after = {key: value if key == "same" else 1 for key, value in before.items() if key != "gone"} | {
        "new": True
    }
    write_plan(resolved)
    note_beginning(resolved, 0, ["nid1"])
    contents = iter(({}, before, {}, after))
    monkeypatch.setattr("kielo.train.records.flat", lambda content: next(contents))
    note_beginning(resolved, 3, ["nid1"])
    changes = read_attempts(tmp_path / "train")[1].changes
    assert changes[:2] == [
        Change(key="gone", before="1.5", after=""), Change(key="k0", before="0", after="1"),
    ]  # fmt: skip
    assert len(changes) == 40 + (more > 0)
    last = Change(key="new", before="", after="true")
    assert changes[-1] == (last if not more else Change(key=f"and {more} keys more", before="", after=""))


def test_a_plan_before_that_cannot_be_read_has_no_changes(resolved: Resolved, tmp_path: Path) -> None:
    note_beginning(resolved, 0, ["nid1"])
    (tmp_path / "resolved.toml").write_text("= no TOML")
    note_beginning(resolved, 3, ["nid1"])
    assert read_attempts(tmp_path / "train")[1].changes == []


def test_attempts_that_cannot_be_written_are_a_warning(resolved: Resolved, tmp_path: Path, caplog) -> None:
    (tmp_path / "train" / "attempts.jsonl").mkdir()
    note_beginning(resolved, 0, ["nid1"])
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"{tmp_path}: the chronicle is not up to date: ")
