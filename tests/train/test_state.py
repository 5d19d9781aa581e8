"""The state of a run and what its checkpoints do with it, by hand."""

import logging
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kielo.resolve.resolved import Resolved, stored_identity
from kielo.train.state import PrecisionSince, State, TrainedSince, WatchedChange, note_alert
from kielo.train.watch.spikes import WentBack
from tests.alerts import alerts
from tests.train.saved_run import Saved, resolved_in
from tests.train.tiny_run import write_tokens


def test_a_state_counts_the_steps_it_takes_and_those_it_passes_over() -> None:
    """Steps of 30 tokens in 5 sequences; ranges that touch are one."""
    state = State()
    assert (state.step, state.tokens, state.samples) == (0, 0, 0)
    state.advance(128, 8)
    state.pass_over(4, 30, 5)
    assert (state.step, state.tokens, state.samples) == (4, 218, 23)
    state.pass_over(6, 10, 2)
    state.advance(128, 8)
    state.pass_over(9, 10, 2)
    assert (state.step, state.tokens, state.samples) == (9, 218 + 20 + 128 + 20, 23 + 4 + 8 + 4)
    assert state.skipped_steps == [(2, 6), (8, 9)]


def test_the_rate_is_lowered_from_the_first_step_of_each_spike_on() -> None:
    spikes = [WentBack(3, 4, 0.5), WentBack(6, 9, 0.25)]
    factors = [State(step=step, spikes=spikes).learning_rate_factor for step in (2, 3, 5, 6, 7)]
    assert factors == [1, 0.5, 0.5, 0.125, 0.125]
    assert State(spikes=spikes).spike_steps == [(3, 4), (6, 9)]


def test_a_parameter_began_when_it_was_last_unfrozen() -> None:
    """The head is trained from the start, the embedding since update 7, the body anew since update 9."""
    of = [(0, ()), (3, ("head",)), (7, ("embed", "head")), (9, ()), (11, ("embed", "head"))]
    ranges = [TrainedSince(*one) for one in of]

    def begun(trained: list[TrainedSince], module: str) -> int | None:
        return State(trained=trained).begun(lambda modules: not modules or module in modules)

    assert [begun(ranges[:4], module) for module in ("head", "embed", "body")] == [0, 7, 9]
    assert [begun(ranges, module) for module in ("head", "embed", "body")] == [0, 7, None]
    assert begun([], "body") == 0


WATCHED = WatchedChange(1, 2.0, 1.0, -1.0, -1.0)


def test_a_state_of_an_older_version_keeps_the_first_values_of_new_fields() -> None:
    state = State(refused_changes=[9], watch=WATCHED)
    state.restore({"step": 5, "tokens": 640, "samples": 40, "precisions": [[1, "bf16"]], "loss": 2.0})
    assert state == State(5, 640, 40, precisions=[PrecisionSince(1, "bf16")])


def test_an_alert_is_a_warning_and_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where it cannot be written, it is a warning all the same."""
    with caplog.at_level(logging.WARNING):
        note_alert(tmp_path / "alerts.jsonl", 7, "the disk is full")
        note_alert(tmp_path / "none" / "alerts.jsonl", 8, "again")
    assert [record.getMessage() for record in caplog.records] == [
        "step 7: the disk is full", "step 8: again",
    ]  # fmt: skip
    assert [(alert["step"], alert["message"]) for alert in alerts(tmp_path)] == [(7, "the disk is full")]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens_of_state")
    write_tokens(folder / "tokens")
    return folder


@pytest.fixture
def resolved(tmp_path: Path, tokens: Path) -> Resolved:
    return resolved_in(tmp_path, tokens)


def test_a_checkpoint_is_due_every_so_many_steps_and_at_the_end(resolved: Resolved) -> None:
    """Twenty steps, saved every six, copied to memory every four."""
    saved = Saved(resolved).track()
    found = [step for step in range(1, 21) if saved.of.due(step) and saved.save(step)]
    assert found == [6, 12, 18, 20]
    assert [step for step in range(1, 21) if saved.of.is_copy_due(step)] == [4, 8, 12, 16, 20]
    measured = Saved(resolved, is_saving=False).track()
    assert not any(measured.of.due(step) or measured.of.is_copy_due(step) for step in range(1, 21))
    assert measured.of.shortage() is None and saved.of.shortage() == "disk full"
    measured.of.save(1.0)
    assert measured.done == []


@pytest.mark.parametrize("trouble", ("spike", "bad steps", "watch"))
def test_a_checkpoint_waits_for_the_next_sound_step(resolved: Resolved, trouble: str) -> None:
    """A change that is watched saves none, and asks for none; the last step saves whatever happens."""
    saved = Saved(resolved).track()

    def set_to(is_there: bool) -> None:
        saved.spikes.episode = "a spike" if is_there and trouble == "spike" else None
        saved.guard.bad_in_a_row = int(is_there and trouble == "bad steps")
        saved.state.watch = WATCHED if is_there and trouble == "watch" else None

    set_to(True)
    assert not any(saved.of.due(step) or saved.of.is_copy_due(step) for step in range(1, 9))
    assert saved.of.due(20)
    set_to(False)
    assert saved.of.due(9) == (trouble != "watch") and saved.of.is_copy_due(12)
    assert saved.of.due(12)


def test_what_a_checkpoint_holds(resolved: Resolved) -> None:
    saved = Saved(resolved)
    saved.of.track(saved.weights, saved.optimiser, {"a.weight": "BF16"})
    names = [f"model/{name}" for name in saved.weights]
    names += [f"optimiser/{name}" for name in saved.optimiser.moments()]
    assert saved.done.pop() == ("reserve", names) and list(saved.of.tensors) == names
    saved.state.advance(128, 8)
    saved.guard.skipped = 0
    saved.of.save(torch.tensor(2.5))
    plain = saved.done.pop()[3]
    counts = {"in_a_row": 0, "skipped": 3, "without_labels": 0, "last": ()}
    expected = {
        "step": 1, "tokens": 128, "samples": 8, "skipped_steps": [], "precisions": [], "refused_changes": [],
        "watch": None, "trouble": None, "spikes": [], "trained": [], "loss": 2.5,
        "optimiser_updates": 5, "guard": counts | {"skipped": 0}, "spike_watch": {"past": []},
        "identity": stored_identity(resolved.identity), "source_tensors": {"a.weight": "BF16"},
        "source_settings": {}, "tokenizer_hash": resolved.placement.tokenizer_hash,
    }  # fmt: skip
    assert plain == expected
    saved.guard.skipped = 3
    saved.of.copy_to_memory(torch.tensor(math.inf))
    kind, step, tensors, plain = saved.done.pop()
    trouble = {"sound_step": 1, "unsound_step": 1}
    assert (kind, step, list(tensors)) == ("copy", 1, names)
    assert plain == expected | {"loss": None, "trouble": trouble, "guard": counts}
    assert saved.state.trouble is None
    saved.of.save(None)
    assert saved.done.pop()[3]["loss"] is None
    saved.of.forget()
    assert saved.of.tensors == {}
    saved.of.track(saved.weights, saved.optimiser)
    saved.of.save(1.0)
    assert saved.done.pop()[3]["source_tensors"] == {}
    unsaved = Saved(resolved, is_saving=False)
    unsaved.of.track(saved.weights, saved.optimiser)
    assert unsaved.done == []


def test_the_last_sound_checkpoint_is_kept_until_sound_steps_have_followed(resolved: Resolved) -> None:
    """Six of them, as checkpoints are saved every six steps; right after a bad step nothing is removed."""
    saved = Saved(resolved).track()
    assert saved.save(3) == (None, None, None)
    saved.guard.skipped, saved.guard.bad_in_a_row = 2, 2
    trouble, kept, keep_all = saved.save(5)
    assert (trouble, kept) == ({"sound_step": 3, "unsound_step": 5}, 3)
    assert keep_all == (
        "the last 2 steps were not finite, so no older checkpoint was removed for step_00000005. If "
        "training fails from there, move it away to resume from an older checkpoint"
    )
    saved.guard.skipped, saved.guard.bad_in_a_row = 3, 0
    assert saved.save(7) == ({"sound_step": 3, "unsound_step": 7}, 3, None)
    assert saved.save(12) == ({"sound_step": 3, "unsound_step": 7}, 3, None)
    assert saved.save(13) == (None, None, None)
    saved.guard.skipped = 4
    assert saved.save(15)[1] == 13


@pytest.mark.parametrize(("first_step", "kept"), [(9, 7), (3, 1)])
def test_the_checkpoint_from_before_a_spike_is_kept(resolved: Resolved, first_step: int, kept: int) -> None:
    """That of the step before the first one that would be passed over; the older of two reasons counts."""
    saved = Saved(resolved).track()
    saved.spikes.episode = SimpleNamespace(first_step=first_step, last_step=12)
    assert saved.save(4) == (None, kept, None)
    saved.guard.skipped = 1
    assert saved.save(10)[1] == min(kept, 4)


def test_a_bad_step_before_the_first_save_has_no_sound_checkpoint_before_it(resolved: Resolved) -> None:
    """Step 0, of which there is none; one bad step is enough."""
    saved = Saved(resolved).track()
    saved.guard.skipped = 1
    assert saved.save(3) == ({"sound_step": 0, "unsound_step": 3}, 0, None)
