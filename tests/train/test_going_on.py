"""What a run goes on from: its newest checkpoint, if that is of the same run; else how it goes on is said."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Resolved
from kielo.train.state import State, WatchedChange
from kielo.train.watch.checks import GuardState
from kielo.train.watch.spikes import WentBack
from tests.train.saved_run import Saved, found_of, in_folder, resolved_in
from tests.train.tiny_run import write_tokens


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens_of_state")
    write_tokens(folder / "tokens")
    return folder


@pytest.fixture
def resolved(tmp_path: Path, tokens: Path) -> Resolved:
    return resolved_in(tmp_path, tokens)


WATCHED = WatchedChange(1, 2.0, 1.0, -1.0, -1.0)
BODY, EMBED, HEAD = "layers.0.mlp.up.weight", "embed.weight", "head.weight"


@pytest.mark.parametrize(
    ("trained", "begun"),
    [
        ([], {EMBED: 0, HEAD: 0, BODY: 0}),
        ([[0, ["embed", "head"]], [3, []]], {EMBED: 0, HEAD: 0, BODY: 3}),
        ([[0, ["head"]], [2, ["embed", "head"]]], {EMBED: 2, HEAD: 0, BODY: None}),
    ],
)
def test_moments_of_what_was_unfrozen_begin_with_it(resolved: Resolved, trained: list, begun: dict) -> None:
    """So does their bias correction after a resume: of five updates a parameter may have seen the last ones.

    What was frozen has no moments to restore: they are 0, and its own first update is still to come.
    """
    saved = Saved(resolved, found_of(resolved, trained=trained)).track()
    saved.of.restore()
    assert saved.optimiser.resumed == (
        5,
        {name: 5 if first is None else first for name, first in begun.items()},
    )
    frozen = {name for name, first in begun.items() if first is None}
    for name, tensor in saved.of.tensors.items():
        parameter = name.split("/")[1]
        is_new = name.startswith("optimiser/") and parameter in frozen
        assert (name not in saved.checkpointer.filled) == is_new, name
        assert tensor.tolist() == [0.0 if is_new else saved.checkpointer.filled[name]] * 2


def test_a_run_goes_on_with_the_state_of_its_newest_checkpoint(resolved: Resolved) -> None:
    """But for the spikes that it goes back for, which an earlier checkpoint does not know of."""
    spike = WentBack(9, 11, 1.0)
    plain = found_of(resolved, spikes=[asdict(spike)], source_tensors={"b": "F32"}, spike_watch={"past": [1]})
    saved = Saved(resolved, plain)
    assert saved.of.found == State(6, 768, 0, spikes=[spike]) and saved.state == State()
    assert saved.of.newest_step == 6
    saved.track()
    saved.state.watch, saved.state.step = WATCHED, 13
    saved.of.due(12)
    saved.of.restore()
    assert saved.state == State(6, 768, 0, spikes=[spike])
    assert saved.guard.restored == GuardState(0, 4) and saved.spikes.restored == {"past": [1]}
    assert not saved.of.due(7)  # what was due before is not
    saved.guard.skipped = 4
    assert saved.save(7) == (None, None, None)
    saved.guard.skipped = 5
    assert saved.save(8)[0] == {"sound_step": 7, "unsound_step": 8}
    more = [spike, replace(spike, first_step=15)]
    saved.state.spikes = more
    saved.of.restore()
    assert saved.state.spikes == more
    saved.of.save(1.0)
    assert saved.done.pop()[3]["source_tensors"] == {"b": "F32"}
    del plain["spike_watch"]
    saved.of.restore()
    assert saved.spikes.restored == {}


def test_without_a_checkpoint_nothing_is_restored(resolved: Resolved) -> None:
    saved = Saved(resolved).track()
    saved.of.restore()
    assert saved.of.newest is None and saved.of.newest_step is None and saved.of.found == State()
    assert saved.guard.restored is None and saved.optimiser.resumed is None


def test_the_newest_checkpoint_is_what_was_saved_or_gone_back_to(resolved: Resolved) -> None:
    saved = Saved(resolved, found_of(resolved))
    before = saved.of.newest
    saved.of.settle()
    assert not saved.of.go_back_to(5) and not saved.of.go_back_before(4)
    assert saved.of.newest == before == saved.checkpointer.path
    for number, move in enumerate((saved.of.settle, lambda: saved.of.go_back_to(5),
                                   lambda: saved.of.go_back_before(4)), start=1):  # fmt: skip
        saved.checkpointer.later = saved.checkpointer.folder / f"step_0000000{number}"
        assert move() in (None, True) and saved.of.newest_step == number
    saved.of.close()
    back = [("go back to", 5), ("go back before", 4)]
    assert saved.done == ["settle", *back, "settle", *back, "close"]


def test_a_change_of_what_is_trained_is_noted_with_the_updates_before_it(resolved: Resolved) -> None:
    """In step 0 it is how the run begins; a change ends the watch over a precision."""
    saved = Saved(resolved).track()
    saved.state.watch = watch = WATCHED
    saved.of.note_trainable(())
    assert saved.state.trained == [] and saved.state.watch == watch
    saved.state.step = 8
    saved.of.note_trainable(("head",))
    assert saved.state.trained == [(0, ()), (5, ("head",))] and saved.state.watch is None
    saved.state.watch, saved.optimiser.updates = watch, 7
    saved.of.note_trainable(("head",))
    assert saved.state.watch == watch
    saved.of.note_trainable(())
    assert saved.state.trained == [(0, ()), (5, ("head",)), (7, ())]
    first = Saved(resolved).track()
    first.optimiser.updates = 0
    first.of.note_trainable(("head", "embed"))
    assert first.state.trained == [(0, ("head", "embed"))]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((), "No checkpoint had been saved before step 9. "),
        (
            (8,),
            "No sound step followed the only checkpoint in {folder}, step_00000008, so its weights may be "
            "spoilt. ",
        ),
        (
            (5, 7),
            "step_00000007 is the newest checkpoint, from before the first bad step 9. The same command "
            "resumes from it. ",
        ),
        (
            (5, 7, 8, 10),
            "step_00000007 is the newest checkpoint that a sound step followed, before the first bad "
            "step 9. Move step_00000008, step_00000010 out of {folder}, and the same command resumes from "
            "step_00000007. ",
        ),
    ],
)
@pytest.mark.parametrize("failure", (None, "reported"))
def test_how_a_run_goes_on_that_ends_by_bad_steps(resolved: Resolved, steps, said, failure) -> None:
    """From step 9 on; a checkpoint of step 8 may be spoilt, as its own update showed in step 9."""
    folder, saved = in_folder(resolved, *steps), Saved(resolved)
    saved.checkpointer.failure = failure
    assert saved.of.way_on(9) == said.format(folder=folder) and saved.done == ["settle"]


def test_a_folder_that_cannot_be_listed_is_said(resolved: Resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> list[Path]:
        raise KieloError("the file system is gone")

    monkeypatch.setattr("kielo.train.state.step_folders", refuse)
    assert Saved(resolved).of.way_on(9) == "the file system is gone. "


@pytest.mark.parametrize(
    ("asked", "steps", "parting", "way_on"),
    [
        (((3, 4),), (2, 3, 5, 6), 3, "move step_00000003, step_00000005, step_00000006 out of {folder}, "
                                     "and the run resumes from step_00000002"),
        (((2, 2), (5, 5)), (5, 6), 5, "move {parent} away, and the run begins at step 0"),
    ],
)  # fmt: skip
def test_other_steps_skipped_are_refused_with_the_checkpoint_to_go_on_from(
    tmp_path: Path, tokens: Path, resolved: Resolved, asked, steps, parting: int, way_on: str
) -> None:
    """The run of step 6 passed over step 2 as asked, or none."""
    skipped = [[2, 2]] if len(asked) > 1 else []
    folder, plain = in_folder(resolved, *steps), found_of(resolved, skipped_steps=skipped)
    other = resolved_in(tmp_path, tokens, skip_steps=asked)
    with pytest.raises(KieloError) as caught:
        Saved(other, plain)
    assert str(caught.value) == (
        f"{folder / 'step_00000006'}: the run skipped different steps from step {parting} on. It "
        f"passed over {skipped or 'none'}, but train.skip_steps = {[list(one) for one in asked]}. "
        f"Fix: train.skip_steps as it was. Or {way_on.format(folder=folder, parent=folder.parent)}"
    )


def test_steps_to_come_and_those_of_spikes_may_differ(
    tmp_path: Path, tokens: Path, resolved: Resolved
) -> None:
    spikes = [{"first_step": 4, "last_step": 5, "learning_rate_factor": 1.0}]
    plain = found_of(resolved, skipped_steps=[[2, 2], [4, 5]], spikes=spikes)
    other = resolved_in(tmp_path, tokens, skip_steps=((2, 2), (7, 8)))
    assert Saved(other, plain).of.found.step == 6


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, tokens: Path, resolved: Resolved) -> None:
    with pytest.raises(
        KieloError, match=r"contains a different run: 1 training settings .*\n  - seed: was 3, is now 4"
    ):
        Saved(resolved_in(tmp_path, tokens, seed=4), found_of(resolved))
