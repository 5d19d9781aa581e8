"""Spikes of the loss: none is seen in natural noise. One that lasts leads back to a checkpoint from before
it, and the run ends as one that never read the text of these steps.
"""

import json
import math
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kielo.artifact.checkpoint_index import read_plain
from kielo.artifact.manifest import write_stage
from kielo.artifact.metrics import PassedOver, Spike, TrainingStep, of_kind, read_metrics
from kielo.artifact.token_shards import TokenShardWriter
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.dataset.batches import Batches
from kielo.recipe import sections
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import TrainIdentity
from kielo.train import build
from kielo.train.log import Log
from kielo.train.run import train
from kielo.train.schedule import learning_rate
from kielo.train.state import RunCheckpoints
from kielo.train.watch import spikes as spike_module
from kielo.train.watch.spikes import (
    Episode,
    Spikes,
    Verdict,
    is_high,
    is_norm_too_large,
    steps_to_pass_over,
    usual_and_deviation,
)
from tests.alerts import alerts
from tests.started_ranks import run_ranks
from tests.train.tiny_run import LENGTH, VOCABULARY, resolve

CPU = torch.device("cpu")


def watched(rows: Iterable[tuple[float, float]], **settings: Any) -> list[Verdict]:
    """The verdicts on a series of (loss, norm), from step 1 on."""
    spikes = Spikes(CPU, TrainIdentity(spikes=sections.Spikes(**settings)))
    spikes.phase = 1
    verdicts = [
        spikes.look(step, torch.tensor(loss), torch.tensor(norm))
        for step, (loss, norm) in enumerate(rows, start=1)
    ]
    return [verdict for verdict in verdicts if verdict is not None]


def natural(seed: int, steps: int) -> np.ndarray:
    """A loss that falls as a power of the steps, with noise of Student's t (3 degrees of freedom, whose
    variance is three times that of its middle), and norms of which one in a hundred is ten times as large.
    """
    generator = np.random.default_rng(seed)
    number = np.arange(1, steps + 1)
    losses = 2 + 8 * number**-0.3 + generator.choice([0.01, 0.1]) * generator.standard_t(3, steps)
    norms = (0.3 + 3 / number**0.5) * np.exp(0.2 * generator.standard_normal(steps))
    return np.stack((losses, norms * np.where(generator.random(steps) < 0.01, 10, 1)), axis=1)


def test_natural_noise_is_no_spike() -> None:
    for seed in range(20):
        assert watched(natural(seed, 400).tolist()) == [], seed


def test_a_spike_that_passes_is_told_and_one_that_lasts_is_harmful() -> None:
    """The steps that stand out are named exactly: they rise by 30 deviations."""
    rows = natural(0, 400)
    rows[:, 1] = 0.3
    rows[300:312, 0] += 3
    (verdict,) = watched(rows.tolist())
    episode = verdict.episode
    assert (verdict.kind, episode.first_step, episode.last_step) == ("passed", 301, 312)
    rows[300:, 0] += 3
    verdict = watched(rows.tolist())[0]
    assert (verdict.kind, verdict.step, verdict.episode.first_step) == ("harmful", 330, 301)
    assert steps_to_pass_over(verdict.episode) == (300, 330)
    assert abs(verdict.episode.usual_loss - np.median(rows[172:300, 0])) < 1e-6


def test_steps_without_a_label_are_none_of_the_usual_ones() -> None:
    """Of every three steps two have no label: the verdicts are those of the other steps alone."""
    rows = natural(0, 400)
    rows[:, 1] = 0.3
    rows[300:312, 0] += 3
    thinned = np.zeros((3 * len(rows), 2))
    thinned[::3] = rows
    (alone,), (verdict,) = watched(rows.tolist()), watched(thinned.tolist(), wait_steps=90)
    assert (verdict.kind, verdict.episode.first_step, verdict.episode.last_step) == ("passed", 901, 934)
    assert verdict.episode.usual_loss == alone.episode.usual_loss
    assert verdict.episode.high_steps == alone.episode.high_steps == 12


def test_a_norm_alone_leads_nowhere_back() -> None:
    rows = natural(1, 400)
    rows[300:, 1] *= 30
    assert watched(rows.tolist())[0].kind == "norm"


def test_an_outlier_is_no_spike_however_short_the_wait() -> None:
    rows = natural(1, 400)
    rows[300, 1] *= 30
    assert watched(rows.tolist(), wait_steps=4) == []


def test_another_phase_has_another_level() -> None:
    spikes = Spikes(CPU, TrainIdentity(spikes=sections.Spikes(window_steps=16)))
    for step in range(1, 200):
        spikes.phase = 1 if step < 100 else 2
        loss = 2 + (step >= 100) * 3 + 0.01 * (step % 7)
        assert spikes.look(step, torch.tensor(loss), torch.tensor(1.0)) is None
    assert spikes.look(200, torch.tensor(9.0), torch.tensor(1.0)) is None and spikes.episode is not None


@pytest.mark.parametrize("stop", (310, 290))
def test_a_resumed_watch_says_the_same(stop: int) -> None:
    """Its state goes through JSON, in the spike and before it, with losses that are not finite."""
    rows = natural(2, 400)
    rows[[100, 305], 0] = np.nan
    rows[300:, 0] += 3
    whole = watched(rows.tolist())
    first, second = (Spikes(CPU, TrainIdentity()) for _ in range(2))
    verdicts = []
    for step, (loss, norm) in enumerate(rows.tolist(), start=1):
        spikes = first if step <= stop else second
        if step == stop + 1:
            second.restore(json.loads(json.dumps(first.plain_state(), allow_nan=False)))
        spikes.phase = 1
        verdicts.append(spikes.look(step, torch.tensor(loss), torch.tensor(norm)))
    assert [verdict for verdict in verdicts if verdict] == whole and whole[0].kind == "harmful"


USUAL, HIGH, HIGHER = (2.0, 1.0), (3.0, 1.0), (4.0, 1.5)
STRONG = (2.0, 2.5)  # a norm that is more than twice the usual one
BAD = (math.nan, 1.0)


def on_eight_usual_steps(rows: list[tuple[float, float]], **settings: Any) -> list[Verdict]:
    """The verdicts on rows from step 9 on, after eight steps without any noise."""
    return watched([USUAL] * 8 + rows, **{"window_steps": 8, "wait_steps": 20} | settings)


def episode(last_step: int, worst: tuple[int, float, float], steps: tuple[int, int, int, int]) -> Episode:
    """One from step 9 on. worst: step, loss, norm; steps: high, high by their loss, calm, not finite."""
    return Episode(9, last_step, 2.0, 1.0, *worst, *steps)


def test_five_usual_steps_in_a_row_end_a_spike() -> None:
    """Of at least three steps; the first of two equal losses is the worst."""
    (verdict,) = on_eight_usual_steps([HIGH, HIGHER, HIGHER, *[USUAL] * 5])
    assert verdict == Verdict("passed", 16, episode(11, (10, 4.0, 1.5), (3, 3, 5, 0)))
    assert on_eight_usual_steps([HIGH, HIGHER, HIGHER, *[USUAL] * 4]) == []
    assert on_eight_usual_steps([HIGH, HIGHER, *[USUAL] * 6]) == []
    (verdict,) = on_eight_usual_steps([HIGH, HIGHER, *[USUAL] * 4, STRONG, *[USUAL] * 5])
    assert verdict == Verdict("passed", 20, episode(15, (10, 4.0, 1.5), (3, 2, 5, 0)))


def test_a_rise_of_two_per_cent_or_a_norm_of_twice_the_usual_is_the_least_that_stands_out() -> None:
    for row, stands_out in (((2.039, 1.0), False), ((2.041, 1.0), True), ((2.0, 1.99), False),
                            ((2.0, 2.01), True)):  # fmt: skip
        assert bool(on_eight_usual_steps([row] * 3 + [USUAL] * 5)) == stands_out, row


def test_a_spike_is_harmful_if_half_of_the_wait_has_a_high_loss() -> None:
    """By then, not earlier. With fewer than half only the norm is told, and two high steps are nothing."""
    half = [HIGH, HIGH, HIGH, USUAL, USUAL, USUAL]
    (verdict,) = on_eight_usual_steps(half, wait_steps=6)
    assert verdict == Verdict("harmful", 14, episode(11, (9, 3.0, 1.0), (3, 3, 3, 0)))
    (verdict,) = on_eight_usual_steps([*half, USUAL], wait_steps=7)
    assert verdict == Verdict("norm", 15, episode(11, (9, 3.0, 1.0), (3, 3, 4, 0)))
    assert on_eight_usual_steps([HIGH, HIGH, *[USUAL] * 4], wait_steps=6) == []
    (verdict,) = on_eight_usual_steps([STRONG] * 6, wait_steps=6)
    assert verdict == Verdict("norm", 14, episode(14, (9, 2.0, 2.5), (6, 0, 0, 0)))


def test_steps_that_are_not_finite_are_harmful_if_too_many_follow_on_each_other() -> None:
    """Three, as `train.max_skipped_steps_in_a_row` says; a sound one begins the count again."""
    (verdict,) = on_eight_usual_steps([BAD, (1.0, math.inf), BAD])
    assert verdict == Verdict("harmful", 11, episode(11, (9, math.inf, 1.0), (3, 3, 0, 3)))
    assert on_eight_usual_steps([BAD, BAD, USUAL, BAD, BAD]) == []


def test_only_usual_steps_move_the_usual_value() -> None:
    """The past is the window's, with the calm steps of a spike; it fills with whatever comes first."""
    spikes = Spikes(CPU, TrainIdentity(spikes=sections.Spikes(window_steps=8)))
    rows = [(9.0, 7.0), *[USUAL] * 7, (2.01, 1.0), HIGH, (2.02, 1.0)]
    for step, (loss, norm) in enumerate(rows, start=1):
        spikes.look(step, torch.tensor(loss, dtype=torch.float64), torch.tensor(norm))
    past = spikes.plain_state()["past"]
    assert past == [pytest.approx(row) for row in [*[USUAL] * 6, (2.01, 1.0), (2.02, 1.0)]]
    assert spikes.episode.calm_steps == 1
    spikes.accept()
    assert spikes.plain_state() == {"phase": 0, "past": [], "episode": None, "waiting": []}


def test_what_stands_out() -> None:
    """By hand: above the median by more than the threshold's deviations and by more than the least rise."""
    level, up = np.full(5, 2.0), math.nextafter
    assert not is_high(2.04, level, 6.0, 0.02) and is_high(up(2.04, 3), level, 6.0, 0.02)
    assert not is_high(-1.97, -level, 6.0, 0.02) and is_high(-1.95, -level, 6.0, 0.02)
    noisy = np.array([1.0, 2.0, 3.0, 2.0, math.nan])  # deviation 1.4826 / 2
    assert not is_high(3.48, noisy, 2.0, 0.02) and is_high(3.49, noisy, 2.0, 0.02)
    assert not is_high(math.inf, np.array([math.inf, math.nan]), 6.0, 0.02)
    assert not is_norm_too_large(2.0, [1.0] * 5, 6.0) and is_norm_too_large(2.01, [1.0] * 5, 6.0)
    logs = np.exp([0.0, 1.0, 2.0, 1.0])  # 1 + 2 × 0.7413
    assert not is_norm_too_large(math.exp(2.48), logs, 2.0) and is_norm_too_large(math.exp(2.49), logs, 2.0)
    assert not is_norm_too_large(0.0, [0.0] * 5, 6.0) and is_norm_too_large(2.1e-30, [0.0] * 5, 6.0)
    assert usual_and_deviation(np.array([3.0, math.nan, 1.0, 7.0, math.inf]))[0] == 3.0
    assert math.isnan(usual_and_deviation(np.array([math.nan]))[0])


def test_the_step_before_a_spike_is_passed_over_too() -> None:
    spike = episode(12, (9, 3.0, 1.0), (3, 3, 0, 0))
    assert [steps_to_pass_over(replace(spike, first_step=first)) for first in (9, 2, 1)] == [
        (8, 12),
        (1, 12),
        (1, 12),
    ]


class OneStepLate:
    """Reads as a GPU does: the numbers of the step before."""

    steps_behind = 1

    def __init__(self, device: torch.device):
        self.queue: list[list[float]] = []

    def read(self, numbers: torch.Tensor) -> list[float] | None:
        self.queue.append(numbers.tolist())
        return self.queue.pop(0) if len(self.queue) > 1 else None

    def unread(self) -> list[list[float]]:
        return list(self.queue)


def test_a_watch_that_reads_a_step_late_resumes_with_what_it_has_not_read(monkeypatch) -> None:
    """Stopped after any step, in a spike and at a new phase: the same verdicts, each with the same step."""
    monkeypatch.setattr(spike_module, "DelayedReader", OneStepLate)
    train_settings = TrainIdentity(spikes=sections.Spikes(window_steps=8, wait_steps=6))
    rows = [*[USUAL] * 9, HIGH, BAD, HIGHER, USUAL, *[HIGH] * 4, *[(5.0, 1.0)] * 9, *[(7.0, 2.5)] * 7]

    def verdicts(stop: int | None) -> list[tuple[int, Verdict]]:
        spikes, found = Spikes(CPU, train_settings), []
        for step, (loss, norm) in enumerate(rows, start=1):
            spikes.phase = 1 if step < 18 else 2
            verdict = spikes.look(step, torch.tensor(loss), torch.tensor(norm))
            if verdict is not None:
                found.append((step, verdict))
            if step == stop:
                state = json.loads(json.dumps(spikes.plain_state(), allow_nan=False))
                assert [row[:2] for row in state["waiting"]] == [[step, 1 if step < 18 else 2]]
                spikes = Spikes(CPU, train_settings)
                spikes.look(99, torch.tensor(99.0), torch.tensor(99.0))  # which the state replaces
                spikes.restore(state)
        return found

    whole = verdicts(None)
    assert [(step, verdict.step, verdict.kind) for step, verdict in whole] == [
        *((step, step - 1, "harmful") for step in (16, 17, 18)),
        *((step, step - 1, "harmful") for step in (33,)),
    ]
    for stop in range(1, len(rows)):
        assert verdicts(stop) == whole, stop


STEPS, POISONED = 40, range(27, 33)
SETTINGS = {"window_steps": 12, "wait_steps": 4}
PASSED_OVER = [[26, 32]]


def write_tokens(folder: Path, poisoned_steps: Iterable[int] = (), is_unknown: bool = False) -> None:
    """Documents that count up by one, which a small model learns at once; the sequences that
    `poisoned_steps` read are of random tokens, or of one that is none (then the loss is infinite).
    """
    count = 90
    sequences: list[int] = []
    if poisoned_steps:
        write_tokens(folder)
        identity = tiny(folder.parent).identity
        batches = Batches(folder, identity.seed, identity.phases[0], LENGTH, 0, True)
        for step in poisoned_steps:
            sequences += batches.order.locate(batches.samples(step)).sequence.tolist()
    generator = np.random.default_rng(7)
    starts = generator.integers(0, VOCABULARY - 1, (count, 1))
    rows = np.append((starts + np.arange(127)) % (VOCABULARY - 1) + 1, np.zeros((count, 1), int), axis=1)
    stream = rows.reshape(-1)
    for sequence in sequences:
        begin = sequence * LENGTH
        random = generator.integers(1, VOCABULARY, LENGTH - 1)
        if is_unknown:  # but its first token, which is the label of the sequence before it
            stream[begin + 1 : begin + LENGTH - 1] = VOCABULARY
        else:
            stream[begin : begin + LENGTH - 1] = random
    with write_stage(folder, "tokens", 1, {}, {"poisoned": sequences}) as stage:
        counts = {}
        for name, documents in (("books", rows), ("heldout", rows[:2])):
            with TokenShardWriter(stage.folder / name, VOCABULARY + 1) as writer:
                for row in documents:
                    writer.add(row)
            (stage.folder / f"{name}.ids.txt").write_text(
                "".join(f"{name}.txt:{number}\n" for number in range(len(documents)))
            )
            counts[name] = {"tokens": documents.size, "documents": len(documents), "bytes": 1}
        stage.counts.update({"heldout": counts.pop("heldout"), "sources": counts})


def tiny(folder: Path, **changes: Any) -> Any:
    return resolve(folder, **{
        "total_steps": STEPS, "mixture": {"books": 1.0}, "learning_rate": 2e-2, "heldout_every_steps": 100,
        "log_every_steps": 100, "every_steps": 10, "micro_batch": 8, "spikes": sections.Spikes(**SETTINGS),
        **changes,
    })  # fmt: skip


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("poisoned")
    torch.set_num_threads(1)
    write_tokens(folder / "tokens", POISONED)
    return folder


def run_in(folder: Path, name: str, max_steps: int | None = None, ranks: int = 1, **changes: Any) -> Path:
    """Trains in a folder of its own beside the tokens; returns its train folder."""
    (folder / name).mkdir(exist_ok=True)
    if not (folder / name / "tokens").exists():
        (folder / name / "tokens").symlink_to(folder / "tokens")
    resolved = tiny(folder / name, **changes)
    if ranks > 1:
        run_ranks(train, ranks, resolved, max_steps, timeout_seconds=300)
    else:
        train(resolved, max_steps)
    return folder / name / "train"


def last_checkpoint(train_folder: Path) -> Path:
    return train_folder / "checkpoints" / f"step_{STEPS:08d}"


def assert_same_end(one: Path, other: Path) -> None:
    tensors = [read_tensors(last_checkpoint(folder)) for folder in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][name]), name


def spikes_with(**settings: Any) -> sections.Spikes:
    return sections.Spikes(**SETTINGS | settings)


def test_a_poisoned_shard_is_passed_over(poisoned: Path) -> None:
    """The poison lasts longer than one wait, so the run goes back twice; with one try allowed it stops and
    names the documents, and with more the same command resumes. It ends bitwise as a run that was told from
    the start to pass over the same steps.
    """
    with pytest.raises(KieloError) as caught:
        run_in(poisoned, "run", spikes=spikes_with(max_tries=1))
    assert "step 34: the loss rose to" in str(caught.value) and "(books.txt:" in str(caught.value)
    assert "`kielo data RECIPE --step 31`" in str(caught.value) or "--step 32`" in str(caught.value)
    assert "train.spikes.max_tries = 1), so it stops" in str(caught.value)
    run = run_in(poisoned, "run")
    assert read_plain(last_checkpoint(run))["skipped_steps"] == PASSED_OVER
    rows = read_metrics(run / "metrics.jsonl")
    assert [(row.passed_over_from, row.step) for row in of_kind(rows, PassedOver)] == [(26, 30), (31, 32)]
    assert {row.passed_over_for for row in of_kind(rows, PassedOver)} == {"spike"}
    assert [(row.spike_from, row.outcome, row.step) for row in of_kind(rows, Spike)] == [
        (27, "went back", 20),
        (31, "went back", 20),
    ]
    first, second = (alert["message"] for alert in alerts(run))
    assert "went back to step 20, passes over steps 26 to 30" in first
    assert "passes over steps 30 to 32" in second
    assert_same_end(run, run_in(poisoned, "by_hand", skip_steps=((26, 32),)))


@pytest.mark.full
def test_told_only_where_asked_or_without_a_checkpoint_from_before(poisoned: Path) -> None:
    told = run_in(poisoned, "told", spikes=spikes_with(response="tell"), max_steps=31)
    assert "It lasts, and training continues because train.spikes.response" in alerts(told)[0]["message"]
    early = run_in(poisoned, "early", every_steps=100, max_steps=31)
    assert "because there is no checkpoint from before it" in alerts(early)[0]["message"]
    assert read_plain(early / "checkpoints" / "step_00000031")["spikes"] == []


@pytest.mark.full
def test_a_stop_in_a_spike_changes_nothing(poisoned: Path) -> None:
    """Stopped in it, before its steps are passed over, and between: the same steps, the same weights."""
    run = run_in(poisoned, "whole")
    for stop in (29, 30, 24, 33):
        run_in(poisoned, "stopped", max_steps=stop)
    stopped = run_in(poisoned, "stopped")
    assert_same_end(stopped, run)


@pytest.mark.full
def test_steps_that_are_not_finite_are_passed_over(tmp_path: Path) -> None:
    """Three in a row lead back; a fourth is left to the guard, and so are all in a run without statistics."""
    torch.set_num_threads(1)
    write_tokens(tmp_path / "tokens", range(27, 31), is_unknown=True)
    run = run_in(tmp_path, "run")
    plain = read_plain(last_checkpoint(run))
    assert plain["skipped_steps"] == [[26, 29]] and plain["guard"]["skipped"] == 1
    with pytest.raises(KieloError, match="not finite 3 steps in a row"):
        run_in(tmp_path, "told", spikes=spikes_with(response="tell"))
    with pytest.raises(KieloError, match="not finite 3 steps in a row"):
        run_in(tmp_path, "early", spikes=spikes_with(window_steps=40))


LAYOUTS = [
    {"shard": 2},
    {"replicate": 2},
    {"pipeline": 2, "pipeline_layers": (1, 1), "micro_batch": 2},
    {"tensor": 2},
    {"context": 2},
]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: next(iter(layout)))
def test_every_layout_passes_over_the_same(poisoned: Path, layout: dict[str, int]) -> None:
    """And a run that went back on one rank goes on on two."""
    name = next(iter(layout))
    run = run_in(poisoned, name, ranks=2, **layout)
    assert read_plain(last_checkpoint(run))["skipped_steps"] == PASSED_OVER
    run_in(poisoned, f"one_and_{name}", max_steps=33)
    run = run_in(poisoned, f"one_and_{name}", ranks=2, **layout)
    assert read_plain(last_checkpoint(run))["skipped_steps"] == PASSED_OVER


@pytest.mark.full
@pytest.mark.parametrize("factor", (1.0, 0.5))
def test_a_learning_rate_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """The rate of steps 27 to 29 is a hundred times too high: the run passes over these and what they
    spoilt, and ends as good as one that was never disturbed. On request the rates after it are lower.
    """
    torch.set_num_threads(1)
    write_tokens(tmp_path / "tokens")
    undisturbed = run_in(tmp_path, "undisturbed", log_every_steps=1)

    def disturbed(identity: Any) -> Callable[[int], float]:
        rate, step = learning_rate(identity), identity.phases[0].tokens_per_step
        return lambda tokens: rate(tokens) * (100 if 27 <= tokens // step <= 29 else 1)

    monkeypatch.setattr(build, "learning_rate", disturbed)
    run = run_in(tmp_path, "run", log_every_steps=1, spikes=spikes_with(learning_rate_factor=factor))
    ((first, last),) = read_plain(last_checkpoint(run))["skipped_steps"]
    assert first <= 27 and last >= 29
    rows = [of_kind(read_metrics(folder / "metrics.jsonl"), TrainingStep) for folder in (undisturbed, run)]
    rates = [{row.step: row.learning_rate for row in of_run} for of_run in rows]
    ratios = {step: rates[1][step] / rates[0][step] for step in rates[1]}
    assert {ratio for step, ratio in ratios.items() if step < first} == {1.0}
    assert {ratio for step, ratio in ratios.items() if step > last} == {factor}
    assert rows[1][-1].loss < 1.5 * rows[0][-1].loss + 0.2  # seven steps fewer; the spike's loss is above 4


@pytest.mark.full
def test_no_false_alarm_in_twenty_undisturbed_runs(tmp_path: Path) -> None:
    """At rates where this model is stable: at 2e-2 a loss of 0.03 rose to 0.5 for thirty steps, a spike."""
    torch.set_num_threads(1)
    write_tokens(tmp_path / "tokens")
    settings = sections.Spikes(window_steps=32)
    for seed in range(20):
        rate = (2e-3, 5e-3, 1e-2)[seed % 3]
        run = run_in(
            tmp_path, f"seed_{seed}", seed=seed, learning_rate=rate, total_steps=120, spikes=settings
        )
        assert not of_kind(read_metrics(run / "metrics.jsonl"), Spike) and not alerts(run), seed


# Calls of the run that goes back twice, first from step 31 to 20 and then from 35: before or after which.
KILLS_IN_GOING_BACK = {
    "before it goes back": (RunCheckpoints, "go_back_before", 1, False),
    "as soon as it went back": (RunCheckpoints, "go_back_before", 1, True),
    "before the rows are dropped": (Log, "go_back", 1, False),
    "after the rows are dropped": (Log, "go_back", 1, True),
    "after the save of what is passed over": (RunCheckpoints, "save", 3, True),
    "between the two": (RunCheckpoints, "go_back_before", 2, False),
    "as soon as it went back again": (RunCheckpoints, "go_back_before", 2, True),
    "in the save after that": (RunCheckpoints, "save", 5, False),
}


def killed_at(folder: Path, part: type, method: str, calls: int, is_after: bool) -> None:
    original, done = getattr(part, method), 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal done
        done += 1
        if done == calls and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **named)
        if done == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(part, method, counted)
    run_in(folder, "killed")


@pytest.mark.full
@pytest.mark.parametrize("when", KILLS_IN_GOING_BACK)
def test_a_kill_while_a_run_goes_back_changes_nothing(poisoned: Path, tmp_path: Path, when: str) -> None:
    """The run passes over the same steps, and ends with the weights of one that nobody killed."""
    whole = run_in(poisoned, "whole")
    (tmp_path / "tokens").symlink_to(poisoned / "tokens")
    with pytest.raises(RuntimeError, match=r"\[rank 0\] ended without a word"):
        run_ranks(killed_at, 1, tmp_path, *KILLS_IN_GOING_BACK[when], timeout_seconds=300)
    killed = run_in(tmp_path, "killed")
    assert_same_end(killed, whole)
    assert read_plain(last_checkpoint(killed))["skipped_steps"] == PASSED_OVER
