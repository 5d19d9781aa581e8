"""A change of precision inside a run is a restart that nobody notices,
and one to fp8 that does harm is taken back.
"""

import gc
import math
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kielo.artifact.checkpoint_index import read_plain
from kielo.artifact.metrics import (
    Fp8GradientProbe,
    PrecisionChange,
    PrecisionVerdict,
    TrainingStep,
    of_kind,
    read_metrics,
)
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.parallel import parallelise
from kielo.recipe.sections import Fp8
from kielo.resolve.software import BACKEND_VARIABLE
from kielo.train import build, precision_change
from kielo.train.precision import change_before
from kielo.train.precision_change import check_watched_change, next_check
from kielo.train.run import train
from kielo.train.state import PrecisionSince, WatchedChange
from tests.alerts import alerts
from tests.train.tiny_run import resolve, write_tokens

STEPS = 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    write_tokens(tmp_path / "tokens")
    return tmp_path


def run_in(folder: Path, name: str, max_steps: int | None = None, **changes: Any) -> Path:
    """Train in a folder of its own; its train folder."""
    (folder / name).mkdir(exist_ok=True)
    if not (folder / name / "tokens").exists():
        (folder / name / "tokens").symlink_to(folder / "tokens")
    changes = {"total_steps": STEPS, "heldout_every_steps": 7, "every_steps": 4, "keep_newest": 9} | changes
    train(resolve(folder / name, **changes), max_steps)
    return folder / name / "train"


def checkpoint(train_folder: Path, step: int) -> Path:
    return train_folder / "checkpoints" / f"step_{step:08d}"


def assert_same_end(one: Path, other: Path) -> None:
    tensors = [read_tensors(checkpoint(path, STEPS)) for path in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][name]), name


def test_which_change_a_step_is_of(folder: Path) -> None:
    identity = resolve(folder, precision="bf16", precision_changes=((4, "fp8"), (8, "fp32"))).identity
    assert [change_before(identity, step, ()) for step in (1, 4, 7, 8)] == [
        (1, "bf16"),
        (4, "fp8"),
        (4, "fp8"),
        (8, "fp32"),
    ]
    assert change_before(identity, 6, [4]) == change_before(identity, 6, [1, 4]) == (1, "bf16")


@pytest.mark.full
def test_a_change_equals_a_restart_by_hand(folder: Path) -> None:
    """fp32, from step 7 on bf16, from step 13 on fp32, in one job: bitwise what three jobs make of it, and
    what is made of it with a stop at the change and another after it.
    """
    changes = {"precision_changes": ((7, "bf16"), (13, "fp32"))}
    inside = run_in(folder, "inside", **changes)
    run_in(folder, "by_hand", max_steps=6)
    run_in(folder, "by_hand", max_steps=12, precision="bf16")
    by_hand = run_in(folder, "by_hand", precision="fp32")
    assert_same_end(inside, by_hand)
    run_in(folder, "stopped", max_steps=6, **changes)
    run_in(folder, "stopped", max_steps=9, **changes)
    assert_same_end(inside, run_in(folder, "stopped", **changes))
    undisturbed = run_in(folder, "undisturbed", max_steps=8)
    assert not torch.equal(
        read_tensors(checkpoint(inside, 8))["model/embed.weight"],
        read_tensors(checkpoint(undisturbed, 8))["model/embed.weight"],
    )
    assert read_plain(checkpoint(inside, STEPS))["precisions"] == [[1, "fp32"], [7, "bf16"], [13, "fp32"]]
    changes = of_kind(read_metrics(inside / "metrics.jsonl"), PrecisionChange)
    assert [(row.step, row.precision) for row in changes] == [(6, "bf16"), (12, "fp32")]


@pytest.mark.full
def test_two_models_never_lie_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before is gone when the next one is made, the optimiser's state with it."""
    made: list[weakref.ref] = []
    alive: list[int] = []
    laid_out, optimiser_of = build.laid_out, build.Optimiser

    def counting(*arguments: Any) -> nn.Module:
        alive.append(sum(reference() is not None for reference in made))
        made.append(weakref.ref(model := laid_out(*arguments)))
        return model

    def counted(*arguments: Any) -> Any:
        optimiser = optimiser_of(*arguments)
        made.extend(weakref.ref(moment) for moment in optimiser.moments().values())
        return optimiser

    def end(garbage: object) -> None:
        gc.unfreeze()
        gc.enable()

    monkeypatch.setattr(build, "laid_out", counting)
    monkeypatch.setattr(build, "Optimiser", counted)
    monkeypatch.setattr(build.Garbage, "end", end)  # as it is: conftest.py leaves out the thaw
    run_in(folder, "run", precision_changes=((7, "bf16"), (15, "fp32")))
    assert alive == [0, 0, 0]


def harmful(model: nn.Module, mesh: object, fp8: Fp8) -> None:
    """Replaces FP8 by hidden states at the wrong scale, as a broken one might make them."""
    model.norm.register_forward_hook(lambda module, inputs, output: output * 8)


def harmless(model: nn.Module, mesh: object, fp8: Fp8) -> None:
    """Replaces FP8 by bf16 as it is."""


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(build, "refuse_without_fp8", lambda device, fp8: None)
    return lambda applied: monkeypatch.setattr(parallelise, "apply_fp8", applied)


WATCHED = {
    "precision": "bf16",
    "precision_changes": ((9, "fp8"),),
    "learning_rate": 1e-4,
    "final_learning_rate": 1e-4,
}


@pytest.mark.parametrize(
    "stop_at", [pytest.param(None, id="at once"), pytest.param(10, id="over a stop", marks=pytest.mark.full)]
)
def test_harm_is_taken_back(folder: Path, pretended: Any, stop_at: int | None) -> None:
    """The run ends bitwise as if it had never changed, says why,
    and does not try again when it is resumed.
    """
    pretended(harmful)
    changes = WATCHED | {"fp8": Fp8(watch_steps=6, max_loss_rise=0.2)}
    if stop_at:
        run_in(folder, "watched", max_steps=stop_at, **changes)
        assert read_plain(checkpoint(folder / "watched" / "train", stop_at))["precisions"][-1] == [9, "fp8"]
    watched = run_in(folder, "watched", **changes)
    assert_same_end(
        watched, run_in(folder, "never", precision="bf16", learning_rate=1e-4, final_learning_rate=1e-4)
    )
    plain = read_plain(checkpoint(watched, STEPS))
    assert (plain["precisions"], plain["refused_changes"], plain["watch"]) == ([[1, "bf16"]], [9], None)
    (alert,) = alerts(watched)
    assert alert["step"] == 8 and "fp8 from step 9 on made the loss rise by" in alert["message"]
    rows = read_metrics(watched / "metrics.jsonl")
    assert [row.step for row in of_kind(rows, TrainingStep)] == list(range(1, STEPS + 1))  # none twice
    verdict = next(row for row in of_kind(rows, PrecisionVerdict) if row.outcome == "taken back")
    assert verdict.loss_rise > 0.2 and verdict.precision_from == 9


def test_what_does_no_harm_stays(folder: Path, pretended: Any) -> None:
    pretended(harmless)
    watched = run_in(folder, "watched", **WATCHED | {"fp8": Fp8(watch_steps=6, max_loss_rise=0.3)})
    plain = read_plain(checkpoint(watched, STEPS))
    assert (plain["precisions"], plain["refused_changes"], plain["watch"]) == (
        [[1, "bf16"], [9, "fp8"]],
        [],
        None,
    )
    (kept,) = of_kind(read_metrics(watched / "metrics.jsonl"), PrecisionVerdict)
    assert kept.outcome == "kept" and kept.step == 14 and abs(kept.loss_rise) < 0.3
    assert alerts(watched) == []


@pytest.mark.full
def test_a_change_ends_the_watch_of_the_one_before(folder: Path, pretended: Any) -> None:
    """Back in bf16 by the recipe, nothing is judged any more, and nothing taken back."""
    pretended(harmless)
    changes = WATCHED | {"precision_changes": ((9, "fp8"), (12, "bf16"))}
    watched = run_in(folder, "watched", **changes | {"fp8": Fp8(watch_steps=6, max_loss_rise=0.3)})
    assert read_plain(checkpoint(watched, STEPS))["precisions"] == [[1, "bf16"], [9, "fp8"], [12, "bf16"]]
    assert not of_kind(read_metrics(watched / "metrics.jsonl"), PrecisionVerdict)


@pytest.mark.full
def test_a_loss_that_is_no_number_is_taken_back(folder: Path, pretended: Any) -> None:
    def broken(model: nn.Module, mesh: object, fp8: Fp8) -> None:
        list(model.layers.values())[-1].register_forward_hook(
            lambda module, inputs, output: output * torch.nan
        )

    pretended(broken)
    watched = run_in(folder, "watched", **WATCHED | {"fp8": Fp8(watch_steps=2)})
    assert_same_end(
        watched, run_in(folder, "never", precision="bf16", learning_rate=1e-4, final_learning_rate=1e-4)
    )


@pytest.mark.full
def test_a_change_of_compiled_layers_is_that_of_uncompiled_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From bf16 to fp32 and back: weights within bf16's rounding of each other."""
    monkeypatch.setenv(BACKEND_VARIABLE, "aot_eager")
    changes = {"precision": "bf16", "precision_changes": ((7, "fp32"), (13, "bf16"))}
    plain, compiled = (
        read_tensors(checkpoint(run_in(folder, name, compile=is_compiled, **changes), STEPS))
        for name, is_compiled in (("plain", False), ("compiled", True))
    )
    assert plain.keys() == compiled.keys()
    for name, tensor in plain.items():
        if name.startswith("model/"):
            assert (tensor - compiled[name]).norm() <= 1e-2 * tensor.norm(), name


@pytest.mark.full
def test_fp8_itself_comes_and_goes(folder: Path) -> None:
    """torchao's, emulated: the run changes to it and back, keeps what does no harm,
    and looks at its gradients.
    """
    fp8 = Fp8(emulate=True, watch_steps=5, probe_every_steps=4, max_loss_rise=1.0, max_gradient_norm_rise=9)
    changes = {
        "precision": "bf16",
        "precision_changes": ((7, "fp8"), (17, "bf16")),
        "optimiser_state": "bf16",
        "total_steps": 20,
    }
    trained = run_in(folder, "fp8", fp8=fp8, **changes)
    assert read_plain(checkpoint(trained, 20))["precisions"] == [[1, "bf16"], [7, "fp8"], [17, "bf16"]]
    cosines = {
        row.step: row.fp8_gradient_cosine
        for row in of_kind(read_metrics(trained / "metrics.jsonl"), Fp8GradientProbe)
    }
    assert list(cosines) == [8, 12, 16]
    # Below 1, for 8 bits are seen, and above what matrices 16 wide leave of them: each entry is a few per
    # cent off.
    assert all(0.9 < cosine < 0.9999 for cosine in cosines.values())
    assert read_tensors(checkpoint(trained, 20))["optimiser/embed.weight/exp_avg"].dtype == torch.bfloat16


class Changing:
    """A run after `step`, whose change to FP8 at step 101 is watched; `done`: what happens, in its order."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, step: int, rows: list[tuple[float, float]],
        saved: int | None = 100, watch_steps: int = 25, **settings: Any,
    ):  # fmt: skip
        self.done: list[Any] = []
        note = self.done.append
        self.state = SimpleNamespace(
            step=step, tokens=10 * step, refused_changes=[7],
            precisions=[PrecisionSince(1, "bf16"), PrecisionSince(101, "fp8")],
            watch=WatchedChange(101, 2.0, 1.0, -1.0, -1.0),
        )  # fmt: skip
        self.guard = SimpleNamespace(last=lambda steps: rows[-steps:])
        self.current = SimpleNamespace(precision="fp8", trainable=())
        self.log = SimpleNamespace(write=note, go_back=lambda step: note(("log", step)))
        self.meter = SimpleNamespace(paused=nullcontext, go_back=lambda tokens: note(("meter", tokens)))
        self.alert = lambda step, message: note((step, message))
        self.checkpoints = SimpleNamespace(
            settle=lambda: note("settle"), newest_step=saved, save=lambda loss: note(("save", loss)),
            go_back_to=lambda step: note(("go back to", step)) or step == saved, note_trainable=str,
        )  # fmt: skip
        train_settings = SimpleNamespace(
            fp8=Fp8(watch_steps=watch_steps, **settings), precision="bf16", precision_changes=((101, "fp8"),)
        )
        self.resolved = SimpleNamespace(identity=SimpleNamespace(
            train=train_settings, phases=[SimpleNamespace(trainable=())], phase_index=lambda step: 0,
        ))  # fmt: skip
        monkeypatch.setattr(precision_change, "compute_in", self.compute_in)
        monkeypatch.setattr(precision_change, "restore", self.restore)

    def compute_in(self, run: Any, resolved: Any, precision: str) -> None:
        self.current.precision = precision
        self.done.append(precision)

    def restore(self, run: Any) -> None:
        self.done.append("restore")
        if ("go back to", 100) in self.done and self.checkpoints.newest_step == 100:
            self.state.step, self.state.tokens = 100, 1000

    def check(self) -> "Changing":
        check_watched_change(self, self.resolved)
        return self


SAME = [(2.0, 1.0)] * 10


def test_a_change_is_judged_every_ten_steps_and_at_the_end_of_the_watch(monkeypatch) -> None:
    """The last look may be sooner; without a watch there is none."""
    run, found = Changing(monkeypatch, 100, SAME), {}
    for run.state.step in range(100, 126):
        found[run.state.step] = next_check(run, Fp8(watch_steps=25), 999)
    assert found == {step: 110 if step < 110 else 120 if step < 120 else 125 for step in range(100, 126)}
    run.state.step = 100
    assert next_check(run, Fp8(watch_steps=25), 107) == 107
    run.state.watch = None
    assert next_check(run, Fp8(), 999) == 999
    assert run.check().done == []


def test_the_mean_of_ten_steps_is_compared_with_that_before_the_change(monkeypatch) -> None:
    """By hand: a loss of 2.04 is 2 % more than 2, a norm of 2 100 % more than 1; the largest rise stays."""
    rows = [(9.0, 9.0), (2.0, 1.0), *[(2.04, 2.0)] * 9]
    run = Changing(monkeypatch, 110, rows).check()
    assert run.state.watch.loss_rise == pytest.approx(0.018)
    assert run.state.watch.gradient_norm_rise == pytest.approx(0.9) and run.done == []
    run = Changing(monkeypatch, 120, SAME)
    run.state.watch = replace(run.state.watch, loss_rise=0.015, gradient_norm_rise=0.5)
    run.check()
    assert (run.state.watch.loss_rise, run.state.watch.gradient_norm_rise) == (0.015, 0.5)
    between = Changing(monkeypatch, 111, [(9.0, 9.0)]).check()
    assert between.done == [] and between.state.watch.loss_rise == -1.0
    rows = [(9.0, 9.0)] * 5 + [(2.02, 1.5)] * 5
    short = Changing(monkeypatch, 105, rows, watch_steps=5).check()
    assert short.done[0].loss_rise == pytest.approx(0.01) and short.state.watch is None


@pytest.mark.parametrize(
    ("row", "settings", "is_harmful"),
    [
        ((2.0, 1.0), {}, False),
        ((2.5, 1.0), {"max_loss_rise": 0.25}, False),  # as much as is allowed
        ((2.5, 1.0), {"max_loss_rise": 0.249}, True),
        ((2.0, 2.0), {}, False),
        ((2.0, 2.01), {}, True),
        ((math.nan, 1.0), {}, True),
        ((2.0, math.nan), {}, True),
    ],
)
@pytest.mark.parametrize("step", (110, 125))
def test_a_change_is_taken_back_or_kept(monkeypatch, row, settings, is_harmful, step) -> None:
    """Taken back at any look, kept at the last one; then the watch is over."""
    run = Changing(monkeypatch, step, [row] * 10, **settings).check()
    if is_harmful:
        assert run.current.precision == "bf16" and run.state.watch is None
    elif step == 110:
        assert run.done == [] and run.state.watch is not None
    else:
        (kept,) = run.done
        assert (kept.outcome, kept.step, kept.tokens, kept.precision_from) == ("kept", 125, 1250, 101)
        assert kept.precision == "fp8" and run.state.watch is None
        assert kept.loss_rise == pytest.approx(row[0] / 2 - 1)
        assert kept.gradient_norm_rise == pytest.approx(row[1] - 1)


@pytest.mark.parametrize(("saved", "step"), [(100, 100), (None, 110), (110, 110)])
def test_what_is_taken_back_is_told_and_not_tried_again(monkeypatch, saved: int | None, step: int) -> None:
    """From the checkpoint at the change, or from here where that is gone, which is saved unless it was."""
    run = Changing(monkeypatch, 110, [(2.5, 1.0)] * 10, saved).check()
    saves = {100: [], None: ["settle", ("save", 2.5), "settle"], 110: ["settle"]}[saved]
    *done, verdict, alert = run.done
    assert done == [("go back to", 100), *saves, "bf16", "restore", ("meter", 10 * step), ("log", step)]
    assert (verdict.outcome, verdict.step, verdict.tokens) == ("taken back", step, 10 * step)
    assert (verdict.precision, verdict.precision_from, verdict.loss_rise) == ("fp8", 101, 0.25)
    assert alert[0] == step and f"continues in bf16 after step {step}." in alert[1]
    assert "fp8 from step 101 on made the loss rise by 25.0% and the gradient norm by 0%" in alert[1]
    assert run.state.refused_changes == [7, 101] and run.state.watch is None


def test_a_watch_begins_with_the_means_of_the_sound_steps_before(monkeypatch) -> None:
    """Steps that were not finite, or whose norm is 0, do not count; without any other there is no watch."""
    rows = [(9.0, 9.0), (1.0, 2.0), (math.nan, 1.0), (1.0, 0.0), (3.0, math.inf), (3.0, 6.0)]
    for given, watch in (
        (rows, WatchedChange(101, 2.0, 4.0, -1.0, -1.0)),
        ([(math.nan, 1.0)], None),
    ):
        run = Changing(monkeypatch, 100, given, watch_steps=5)
        run.current.precision, run.state.precisions = "bf16", [PrecisionSince(1, "bf16")]
        precision_change.settle_precision(run, run.resolved)
        assert run.state.watch == watch and run.state.precisions == [(1, "bf16"), (101, "fp8")]
        assert run.done[:3] == ["settle", "fp8", "restore"]
        assert (run.done[3].step, run.done[3].precision) == (100, "fp8")
        run.done.clear()
        precision_change.settle_precision(run, run.resolved)
        assert run.done == []
