"""What the watches over a run decide and say, without ranks: going back for replicas and for spikes."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kielo.artifact.metrics import Spike
from kielo.parallel.replicas import Difference
from kielo.recipe import sections
from kielo.recipe.errors import KieloError
from kielo.train import run as run_module
from kielo.train.run import go_back
from kielo.train.watch import checks, spikes
from kielo.train.watch.checks import ReplicaCheck, TakenStep
from kielo.train.watch.spikes import Episode, SpikeWatch, Verdict, WentBack


class Checkpoints:
    """Notes what is asked of it; there is one of step `saved`."""

    def __init__(self, saved: int | None = 0) -> None:
        self.saved, self.asked = saved, []

    def go_back_before(self, step: int) -> bool:
        self.asked.append(step)
        return self.saved is not None and self.saved < step


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checks,
        "Agreement",
        lambda: SimpleNamespace(gather=lambda _: [f"nid{rank}" for rank in range(5)]),
    )


def replicas(*differences: Difference, exist: bool = True) -> Any:
    return SimpleNamespace(exist=exist, differences=lambda: list(differences))


def check(every: int, checkpoints: Checkpoints) -> ReplicaCheck:
    train = sections.TrainPlacement(compare_replicas_every_steps=every)
    return ReplicaCheck(train, checkpoints.go_back_before)


def must_go_back(watch: ReplicaCheck, step: int, replicas: Any, is_kept: bool) -> bool:
    """As the loop asks after each step, and once more before a step is kept."""
    loss = torch.tensor(1.0)
    taken = TakenStep(step, loss, loss, loss, None, replicas)
    answers = [watch.after_step(taken), *([watch.before_keeping(taken)] if is_kept else [])]
    return "go back" in answers


NORM = Difference("model/norm.weight", (2,))


def test_replicas_are_compared_every_k_steps_and_before_each_save() -> None:
    """Not in other steps, where there are none, or with 0; equal replicas lead nowhere back."""
    found = {
        (step, is_saving): must_go_back(check(3, Checkpoints()), step, replicas(NORM), is_saving)
        for step in range(1, 8)
        for is_saving in (False, True)
    }
    assert found == {(step, is_saving): is_saving or step in (3, 6) for step, is_saving in found}
    assert not must_go_back(check(0, Checkpoints()), 3, replicas(NORM), True)
    assert not must_go_back(check(3, Checkpoints()), 3, replicas(NORM, exist=False), True)
    same, checkpoints = check(3, Checkpoints()), Checkpoints()
    assert not must_go_back(same, 3, replicas(), True) and same.found == "" and checkpoints.asked == []


def test_what_differs_is_named_with_its_ranks_and_hosts() -> None:
    """Four tensors of each set of ranks, in the order of the ranks and of the names."""
    many = [Difference(f"model/{name}", (0, 1)) for name in "fedcba"]
    watch = check(3, Checkpoints(5))
    assert must_go_back(watch, 6, replicas(NORM, *many), False)
    assert watch.found == (
        "replicas differ: model/a, model/b, model/c, model/d and 2 more on rank 0 (nid0) or rank 1 (nid1); "
        "model/norm.weight on rank 2 (nid2)"
    )
    four = check(3, Checkpoints())
    must_go_back(four, 3, replicas(*many[:4]), False)
    assert (
        four.found == "replicas differ: model/c, model/d, model/e, model/f on rank 0 (nid0) or rank 1 (nid1)"
    )


def test_the_run_goes_back_to_before_the_comparison() -> None:
    """A checkpoint of the very step is of what differs; without an earlier one the run ends."""
    checkpoints = Checkpoints(8)
    assert must_go_back(check(3, checkpoints), 9, replicas(NORM), True) and checkpoints.asked == [9]
    for saved in (9, None):
        watch = check(3, Checkpoints(saved))
        with pytest.raises(
            KieloError, match=r"^step 9: replicas differ: .*and no checkpoint was saved before"
        ):
            must_go_back(watch, 9, replicas(NORM), True)
        assert watch.found == ""


def test_a_rank_that_is_found_twice_ends_the_run_and_another_does_not() -> None:
    checkpoints = Checkpoints()
    watch = check(3, checkpoints)
    assert must_go_back(watch, 3, replicas(NORM), False)
    assert must_go_back(watch, 6, replicas(replace(NORM, ranks=(0, 1))), False)
    assert must_go_back(watch, 9, replicas(replace(NORM, ranks=(3,))), False)
    for ranks in ((2,), (1, 4), (3,)):
        with pytest.raises(KieloError, match=r"^step 12: replicas differ: .*It is not the first time"):
            must_go_back(watch, 12, replicas(replace(NORM, ranks=ranks)), False)
        assert checkpoints.asked == [3, 6, 9]


EPISODE = Episode(
    first_step=27, last_step=30, usual_loss=2.5, usual_norm=0.5, worst_step=29, worst_loss=7.25,
    worst_norm=12.5, high_steps=4, loss_steps=4,
)  # fmt: skip
DESCRIBED = (
    "the loss rose to 7.25 (usual: 2.5) and the gradient norm to 12.5 (usual: 0.5) in steps 27 to 30, most "
    "in step 29, with text of books (b:1, b:2, b:3, b:4, b:5 and 1 more) and web (w:9) (all of it: `kielo "
    "data RECIPE --step 29`)"
)


def row(outcome: str, step: int = 31) -> Spike:
    return Spike(
        step=step, spike_from=27, spike_to=30, outcome=outcome, highest_loss=7.25, usual_loss=2.5,
        highest_loss_step=29,
    )  # fmt: skip


class Watched:
    """A watch whose next verdict a test sets; `told`: rows of the log and alerts, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, saved: int | None = 20, **settings: Any):
        rows = [{"source": "web", "document": "w:9"}] + [
            {"source": "books", "document": f"b:{number}"} for number in (1, 2, 1, 3, 4, 5, 6)
        ]
        asked: list[Any] = []
        monkeypatch.setattr(spikes, "documents_of_step", lambda *given: asked.append(given) or rows)
        self.verdict: Verdict | None = None
        self.told: list[Any] = []
        self.accepted = 0
        self.looked: list[Any] = []
        identity = SimpleNamespace(
            train=SimpleNamespace(spikes=sections.Spikes(**settings)), seed=3, phases=["only"],
            longest_sequence_length=16, phase_index=lambda step: 0,
        )  # fmt: skip
        placement = SimpleNamespace(tokens_folder="tokens", end_of_text_id=0)
        self.state, self.checkpoints = SimpleNamespace(spikes=[]), Checkpoints(saved)
        self.watch = SpikeWatch(
            SimpleNamespace(look=self.look, accept=self.accept),
            SimpleNamespace(identity=identity, placement=placement),
            self.checkpoints.go_back_before,
            lambda: self.state.spikes,
            self.told.append,
            lambda step, message: self.told.append((step, message)),
        )
        self.asked = asked

    def look(self, *given: Any) -> Verdict | None:
        self.looked.append(given)
        return self.verdict

    def accept(self) -> None:
        self.accepted += 1

    def must_go_back(self, kind: str | None, **changes: Any) -> bool:
        self.verdict = None if kind is None else Verdict(kind, 31, replace(EPISODE, **changes))
        loss, norm = torch.tensor(7.0), torch.tensor(3.0)
        return self.watch.after_step(TakenStep(31, loss, norm, loss, None, None)) == "go back"


LASTS = ". It lasts, and training continues because "


@pytest.mark.parametrize(
    ("kind", "settings", "saved", "outcome", "ending", "accepted"),
    [
        ("passed", {}, 20, "passed", ". It passed by itself", 0),
        ("norm", {}, 20, "told", ". The loss recovered, the norm did not, and training continues", 1),
        ("harmful", {"response": "tell"}, 20, "told", LASTS + 'train.spikes.response = "tell"', 1),
        ("harmful", {}, 26, "told", LASTS + "there is no checkpoint from before it", 1),
        ("harmful", {}, None, "told", LASTS + "there is no checkpoint from before it", 1),
    ],
)  # fmt: skip
def test_a_spike_that_nothing_is_done_about_is_told(
    monkeypatch: pytest.MonkeyPatch, kind, settings, saved, outcome, ending, accepted
) -> None:
    """A row of the log and an alert; what lasts is the usual value from now on."""
    watched = Watched(monkeypatch, saved, **settings)
    assert not watched.must_go_back(None) and watched.told == []
    assert not watched.must_go_back(kind)
    assert watched.told == [row(outcome), (31, DESCRIBED + ending)]
    assert watched.accepted == accepted and watched.watch.harmful is None
    assert watched.checkpoints.asked == ([26] if kind == "harmful" and not settings else [])
    assert watched.asked[0][1:6] == (3, "only", 16, 0, 29) and str(watched.asked[0][0]) == "tokens"
    assert watched.looked[-1] == (31, torch.tensor(7.0), torch.tensor(3.0))


def test_a_harmful_spike_leads_back_to_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of step 25: the text of step 26 is passed over too. Steps that are not finite are told by
    the guard.
    """
    watched = Watched(monkeypatch, 25)
    assert watched.must_go_back("harmful") and watched.watch.harmful == EPISODE
    assert watched.checkpoints.asked == [26] and watched.told == [] and watched.accepted == 0
    without = Watched(monkeypatch, None)
    assert not without.must_go_back("harmful", not_finite=1) and without.told == []


def test_a_run_goes_back_so_many_times_for_spikes_that_follow_on_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The window is 8 steps: from the end of one to the first step that is passed over for the next."""
    watched = Watched(monkeypatch, max_tries=2, window_steps=8)
    steps = {"late": (18, 20), "before it": (5, 10), "too early": (4, 9)}
    spikes = {name: WentBack(*of, learning_rate_factor=1.0) for name, of in steps.items()}
    for before in ([], ["late"], ["before it"], ["too early", "late"]):
        watched.state.spikes = [spikes[name] for name in before]
        assert watched.must_go_back("harmful"), before
    watched.state.spikes = [spikes["before it"], spikes["late"]]
    with pytest.raises(KieloError) as caught:
        watched.must_go_back("harmful")
    message = str(caught.value)
    assert message.startswith(f"step 31: {DESCRIBED}. The run went back 2 times for spikes that follow on")
    assert "(train.spikes.max_tries = 2), so it stops" in message
    assert "train.skip_steps = [[26, 30]] and more" in message
    watched.state.spikes = [spikes["before it"], WentBack(17, 17, 1.0)]
    assert watched.must_go_back("harmful")  # 26 - 17 is more than the window


def test_text_that_cannot_be_read_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> list[dict]:
        raise OSError("gone")

    watched = Watched(monkeypatch)
    monkeypatch.setattr(spikes, "documents_of_step", lost)
    watched.must_go_back("passed")
    assert "with text of documents that could not be read (gone) (all of it:" in watched.told[1][1]


class Going:
    """A run after step 31, whose newest checkpoint is of step 20; `done`: what happens, in its order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: list[tuple[float, float]]):
        self.done: list[Any] = []
        note = self.done.append
        self.state = SimpleNamespace(step=31, tokens=3100, spikes=[], refused_changes=["taken back"])
        self.meter = SimpleNamespace(paused=self.paused, go_back=lambda tokens: note(("meter", tokens)))
        self.log = SimpleNamespace(write=note, go_back=lambda step: note(("log", step)))
        self.checkpoints = SimpleNamespace(save=lambda loss: note(("save", loss, list(self.state.spikes))))
        self.guard = SimpleNamespace(last=lambda steps: last[-steps:])
        self.replica_check = SimpleNamespace(found="")
        self.spike_watch = SimpleNamespace(
            harmful=None, described=lambda episode: f"worst in {episode.worst_step}",
            row=lambda episode, step, outcome: (episode.worst_step, step, outcome),
        )  # fmt: skip
        self.alert = lambda step, message: note((step, message))
        monkeypatch.setattr(run_module, "restore", self.restore)

    @contextmanager
    def paused(self):
        self.done.append("pause")
        yield
        self.done.append("go on")

    def restore(self, run: Any) -> None:
        self.state.step, self.state.tokens, self.state.refused_changes = 20, 2000, []
        self.done.append("restore")


@pytest.mark.parametrize("factor", (1.0, 0.5))
def test_going_back_for_a_spike_saves_what_is_passed_over(monkeypatch: pytest.MonkeyPatch, factor) -> None:
    """In the checkpoint that the run went back to, with that step's loss; the spike is answered once."""
    run, settings = Going(monkeypatch, [(3.0, 1.0), (2.5, 1.0)]), sections.Spikes(learning_rate_factor=factor)
    assert not go_back(run, settings) and run.done == []
    run.spike_watch.harmful = EPISODE
    assert go_back(run, settings)
    passed_over = WentBack(26, 30, factor)
    lower = "" if factor == 1 else " with 0.5 of the learning rate"
    message = f"worst in 29. The run went back to step 20, passes over steps 26 to 30, and continues{lower}"
    assert run.done == [
        "pause", "restore", ("meter", 2000), ("log", 20), ("save", 2.5, [passed_over]), "go on",
        (29, 20, "went back"), (20, message),
    ]  # fmt: skip
    assert run.state.refused_changes == ["taken back"]
    assert not go_back(run, settings)


def test_going_back_for_a_difference_restores_and_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Going(monkeypatch, [])
    run.replica_check.found = "replicas differ"
    assert go_back(run, sections.Spikes())
    alert = (31, "replicas differ. The run went back to step 20")
    assert run.done == ["pause", "restore", ("meter", 2000), ("log", 20), "go on", alert]
    assert not go_back(run, sections.Spikes()) and run.state.spikes == []
    run.spike_watch.harmful = EPISODE
    assert go_back(run, sections.Spikes()) and ("save", None, run.state.spikes) in run.done
