"""A run of one process up to its loop, which a test replaces: what is built, noted, and said of a hang."""

import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kielo.artifact.attempt_files import REFUSAL_FILE, Outcome, read_attempts, read_refusal
from kielo.artifact.manifest import read_manifest
from kielo.artifact.metrics import METRICS_NAME, HeldOutLoss, of_kind, read_metrics
from kielo.artifact.stage_json import read_json
from kielo.dataset.batches import Batches
from kielo.ranks.hang_watch import silent_seconds
from kielo.recipe.errors import KieloError
from kielo.train import build
from kielo.train import run as run_module
from kielo.train.parts import PhaseParts, Run
from kielo.train.run import measure, train
from tests.train.tiny_run import resolve, write_tokens


class Reached(Exception):
    """The end of a test's run."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens_of_run")
    write_tokens(folder / "tokens")
    return folder


def resolved_in(folder: Path, tokens: Path, **changes: Any) -> Any:
    return resolve(tokens, train_folder=str(folder / "train"), **changes)


@pytest.mark.parametrize(
    ("skipped", "asked", "last"),
    [((), 1, 1), ((), 20, 20), (((1, 2), (5, 6)), 6, 8), (((1, 3),), 17, 20), (((1, 2), (3, 4)), 2, 6)],
)
def test_steps_to_measure_begin_after_those_that_are_skipped(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch, skipped: tuple, asked: int, last: int
) -> None:
    def stop(*given: Any) -> None:
        raise Reached(given)

    monkeypatch.setattr(run_module, "Stop", stop)
    resolved = resolved_in(tmp_path, tokens, skip_steps=skipped)
    with pytest.raises(Reached) as caught:
        measure(resolved, asked)
    assert caught.value.args == ((last, True),)
    left = 20 - (last - asked)
    with pytest.raises(KieloError, match=rf"--measure {left + 1}: only {left} steps of the run are left"):
        measure(resolved, left + 1)


def test_a_run_that_ends_with_skipped_steps_scores_its_last_weights(tmp_path: Path) -> None:
    """The steps passed over change no weight, so the score is that of the last step that was trained."""
    write_tokens(tmp_path / "tokens")
    outcome = train(resolve(tmp_path, skip_steps=((17, 20),), heldout_every_steps=16))
    rows = of_kind(read_metrics(tmp_path / "train" / METRICS_NAME), HeldOutLoss)
    assert (outcome.outcome, outcome.step, [row.step for row in rows]) == ("finished", 20, [16, 20])
    assert rows[1].heldout_loss == rows[0].heldout_loss
    assert read_manifest(tmp_path / "train").counts["heldout_loss"] == rows[0].heldout_loss


class Heart:
    """In place of the heartbeat: the test says when the job hangs."""

    made: "Heart"

    def __init__(self, world: Any, progress: Any, stacks: Path, on_hang: Callable[[str, bool], None]):
        self.progress, self.stacks, self.hang, self.groups = progress, stacks, on_hang, None
        Heart.made = self

    def use(self, groups: Any, alike: Any) -> None:
        self.groups = groups

    def __enter__(self) -> "Heart":
        return self

    def __exit__(self, *problem: object) -> None:
        pass


@pytest.fixture
def looping(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[Run, PhaseParts], Any]]:
    """What the loop does, in place of training; the run then fails with `Reached`."""
    torch.set_num_threads(1)
    does: list[Callable[[Run, PhaseParts], Any]] = []

    def fit(run: Run, phase: PhaseParts) -> bool:
        for one in does:
            one(run, phase)
        raise Reached("the end")

    monkeypatch.setattr(run_module, "fit", fit)
    monkeypatch.setattr(run_module, "Heartbeat", Heart)
    return does


@pytest.mark.parametrize("parent", (False, True))
def test_a_hang_is_recorded_where_it_can_be(
    tmp_path: Path, tokens: Path, looping: list, monkeypatch, capsys, parent: bool
) -> None:
    """What a person must put right goes to the process that started the ranks, or is printed."""
    file = tmp_path / "refusal"
    if parent:
        monkeypatch.setenv(REFUSAL_FILE, str(file))
    else:
        monkeypatch.delenv(REFUSAL_FILE, raising=False)
    seen: list[Any] = []

    def note(comes_again: bool) -> None:
        Heart.made.hang("all ranks wait", comes_again, ["nid7"])
        outcome = read_json(tmp_path / "train", Outcome)
        seen.append(outcome and (outcome.outcome, outcome.step, outcome.tokens, outcome.message))
        assert outcome is None or outcome.blamed_nodes == ["nid7"]
        refusal = read_refusal(file)
        assert refusal is None or (refusal.blamed_nodes, refusal.is_usage) == (["nid7"], False)
        seen.append((refusal and refusal.message, capsys.readouterr().err))
        file.unlink(missing_ok=True)

    def in_training(run: Run, phase: PhaseParts) -> None:
        run.state.advance(128, 8)
        note(False)
        note(True)

    assemble = run_module.assemble

    def before(*given: Any) -> Run:
        (tmp_path / "train").mkdir()
        note(False)
        return assemble(*given)

    limits: list[tuple] = []
    progress = run_module.Progress
    monkeypatch.setattr(run_module, "Progress", lambda *given: (limits.append(given), progress(*given))[1])
    monkeypatch.setattr(run_module, "assemble", before)
    looping.append(in_training)
    with pytest.raises(Reached):
        train(
            resolved_in(
                tmp_path, tokens, hang_seconds=17.0, step_timeout_seconds=40.0, file_stall_seconds=9.0
            )
        )
    said = ("all ranks wait", "") if parent else (None, "kielo: all ranks wait\n")
    silent = (None, "") if parent else said
    assert seen[:2] == [None, said]
    assert seen[2:4] == [("hung", 1, 128, "all ranks wait"), silent]
    assert seen[4:] == [("failed", 1, 128, "all ranks wait"), said]
    outcome = read_json(tmp_path / "train", Outcome)
    assert (outcome.outcome, outcome.step, outcome.message) == ("failed", 1, "Reached: the end")
    assert Heart.made.stacks == tmp_path / "train" / "stacks" and Heart.made.groups is not None
    # One rank alone waits as long as a step may take.
    assert limits == [(40.0, silent_seconds(40.0, 1), 120.0, 40.0, 9.0)]


def test_the_batches_of_a_step_are_those_of_the_order(
    tmp_path: Path, tokens: Path, looping: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filled up to whole micro-batches: eight sequences in micro-batches of three, the ninth is empty."""
    feeds: list[Any] = []
    feed = build.Feed

    def noted(*given: Any) -> Any:
        feeds.append(given)
        return feed(*given)

    monkeypatch.setattr(build, "Feed", noted)
    looping.append(lambda run, phase: feeds.append((run.time_limits.progress.limits()[0], phase)))
    looping.append(lambda run, phase: phase.feed.take(1))
    resolved = resolved_in(tmp_path, tokens, micro_batch=3)
    before = threading.enumerate()  # a reader that another test froze may be among them
    with pytest.raises(Reached):
        train(resolved)
    assert not any(thread.name == "feed" for thread in threading.enumerate() if thread not in before)
    (read_step, rows, last_step, device, positions, replacement), (still, phase) = feeds
    assert (rows, last_step, device.type, positions) == (3, 20, "cpu", None)
    assert (phase.last_step, phase.tokens_per_step, phase.sequences_per_step) == (20, 128, 8)
    identity = resolved.identity
    batches = Batches(tokens / "tokens", identity.seed, identity.phases[0], 16, 0, True)
    for read in (read_step, replacement.reopened()):
        batch, expected = read(5), batches.step(5, data_rank=0, data_ranks=1)
        assert len(batch.inputs) == 9 and (batch.labels[8] == -100).all()
        assert (batch.inputs[:8] == expected.inputs).all() and (batch.labels[:8] == expected.labels).all()
        assert batch.samples.tolist() == list(range(32, 40)) and batch.dropout_keys is None
    with replacement.waiting() as seconds:
        assert seconds == pytest.approx(0.9 * still)
    replacement.alert(3, "no answer")
    alert = json.loads((tmp_path / "train" / "alerts.jsonl").read_text().splitlines()[-1])
    assert (alert["step"], alert["message"]) == (3, "no answer")


@pytest.mark.parametrize("has_board", (False, True))
def test_the_parts_of_a_run(
    tmp_path: Path, tokens: Path, looping: list, monkeypatch, has_board: bool
) -> None:
    """On one rank: it writes the metrics, TensorBoard's where that is asked for, and looks at resources."""
    built: dict[str, Any] = {}
    asked_steps: list[int] = []

    def noting(name: str) -> None:
        made = getattr(build, name)

        def note(*given: Any, **named: Any) -> Any:
            built[name] = given, named
            return made(*given, **named)

        monkeypatch.setattr(build, name, note)

    for name in ("Log", "Resources", "Garbage", "Profile", "Meter", "HeldOut", "note_alert", "Batches"):
        noting(name)
    enabled: list[str] = []
    handler = SimpleNamespace(is_enabled=lambda: has_board, enable=lambda: enabled.append("enabled"))
    monkeypatch.setattr(run_module, "faulthandler", handler)
    ended: list[str] = []

    def note_end(part: Any, name: str, of: str) -> None:
        end = getattr(part, name)
        monkeypatch.setattr(part, name, lambda: (ended.append(of), end()))

    alerts: list[str] = []
    looping.append(lambda run, phase: run.alert(7, "an alert"))

    def look(run: Run, phase: PhaseParts) -> None:
        lap = run.meter.lap(128)
        assert lap["tflops_per_second"] == lap["mfu"] == pytest.approx(lap["tokens_per_second"] * 1000 / 1e12)
        run.spike_watch.spikes.look(1, torch.tensor(2.0), torch.tensor(1.0))
        (made,) = run.current.periodic
        assert (made.of, made.stop, asked_steps[0]) == (run.current.model, run.stop, 0)
        assert not gc.isenabled()  # it has its time between steps
        assert not (tmp_path / "train" / "outcome.json").exists() and (tmp_path / "resolved.toml").exists()
        (begun,) = read_attempts(tmp_path / "train")
        assert (begun.from_step, begun.ranks) == (0, 1)
        assert run.step_row.phase == run.spike_watch.spikes.plain_state()["phase"] == 1
        assert built["Resources"][0][2] == run.checkpoints.shortage
        note_end(run.checkpoints, "close", "checkpoints")
        note_end(run.profile, "close", "profile")
        note_end(run.garbage, "end", "garbage")
        note_end(run.log, "close", "log")

    looping.append(look)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "outcome.json").write_text("of an attempt before")
    looping.append(lambda run, phase: alerts.append((tmp_path / "train" / "alerts.jsonl").read_text()))
    with pytest.raises(Reached):
        train(
            resolved_in(
                tmp_path, tokens, tensorboard=has_board, collect_garbage_every_steps=13,
                heldout_every_steps=9, pipeline_schedule="zbv",
            ),
            profile_steps=2,
            periodic=(
                lambda parts, mesh, stop: SimpleNamespace(
                    of=parts.model, stop=stop, is_owed=lambda step: bool(asked_steps.append(step))
                ),
            ),
        )  # fmt: skip
    sinks = [type(sink).__name__ for sink in built["Log"][0][2]]
    assert sinks == ["Terminal", "MetricsFile", *["TensorBoard"] * has_board] and built["Log"][0][1] == 20
    assert built["Garbage"] == ((13,), {}) and built["Meter"][0][:2] == (1, 2560)
    assert built["Profile"][0][:3] == (str(tmp_path / "train"), 3, 2)
    assert built["Resources"][1] == {"is_looking": True}
    assert built["HeldOut"][0][5:] == (9, 20) and len(built["HeldOut"][0][0]) == 1
    assert built["HeldOut"][0][0][0].has_bits and "Batches" in built
    assert enabled == ([] if has_board else ["enabled"])
    assert ended == ["checkpoints", "profile", "garbage", "log"] and not dist.is_initialized()
    assert "an alert" in alerts[0] and (tmp_path / "train" / "tensorboard").exists() == has_board
    assert gc.isenabled() and (tmp_path / "train" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("error", "begun", "message"),
    [
        (KieloError("no memory"), True, "no memory"),
        (ValueError("odd"), True, "ValueError: odd"),
        (KieloError("another run"), False, None),
        (ValueError("odd"), False, "ValueError: odd"),
    ],
)
def test_a_refusal_before_training_is_not_recorded(
    tmp_path: Path, tokens: Path, looping: list, monkeypatch, error: Exception, begun: bool, message
) -> None:
    """Any other error is, and the outcome of an attempt before goes when training begins."""

    def fail(*given: Any) -> None:
        raise error

    looping.append(fail)
    if not begun:
        monkeypatch.setattr(run_module, "assemble", fail)
    with pytest.raises(type(error), match=str(error)):
        train(resolved_in(tmp_path, tokens))
    outcome = read_json(tmp_path / "train", Outcome)
    assert (outcome and (outcome.outcome, outcome.message)) == (message and ("failed", message))


def test_steps_that_are_measured_are_no_attempt(tmp_path: Path, tokens: Path, looping: list) -> None:
    """Of a run that a person may begin in earnest: its chronicle is empty."""
    with pytest.raises(Reached):
        measure(resolved_in(tmp_path, tokens), 2)
    assert read_attempts(tmp_path / "train") == [] and (tmp_path / "resolved.toml").exists()
