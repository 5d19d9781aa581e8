"""Watch loss and gradient norm for spikes, rises out of the noise of earlier steps, and answer them alike on
all ranks.

The usual value is the median of the last steps, and their noise is 1.4826 × their median absolute deviation,
the standard deviation of Gaussian noise (Rousseeuw and Croux 1993): up to half of the steps can be odd. The
noise of gradient norms grows with their size, so their logarithms are compared.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kielo.artifact.metrics import Row, Spike
from kielo.checkpoint.agreement import Agreement
from kielo.dataset.query import documents_of_step
from kielo.ranks.hang_watch import some
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Spikes as SpikeSettings
from kielo.recipe.sections import TrainIdentity
from kielo.resolve.resolved import Resolved
from kielo.train.watch.checks import Answer, DelayedReader, TakenStep, has_no_label

LEAST_LOSS_RISE = 0.02  # of the usual loss: a run that knows its text by heart has almost no noise
LEAST_NORM_RISE = math.log(2)
CALM_STEPS = 5  # usual steps in a row that end a spike
FEWEST_STEPS = 3  # of a spike: heavy-tailed noise has single outliers too
STANDARD_DEVIATION_BY_MAD = 1.4826
NAMED_DOCUMENTS = 5  # of each source


@dataclass
class Episode:
    """Steps from the first step that stood out, with the usual values before it."""

    first_step: int
    last_step: int
    usual_loss: float
    usual_norm: float
    worst_step: int
    worst_loss: float
    worst_norm: float
    high_steps: int = 0  # that stood out
    loss_steps: int = 0  # that stood out by their loss
    calm_steps: int = 0
    not_finite: int = 0  # of the last steps


@dataclass(frozen=True)
class WentBack:
    """A spike that the run went back for: the steps to pass over, and the factor of later learning rates."""

    first_step: int
    last_step: int
    learning_rate_factor: float


@dataclass(frozen=True)
class Verdict:
    """The kind of an episode at `step`. "harmful": its loss stayed high, or was not finite too often."""

    kind: Literal["passed", "norm", "harmful"]
    step: int
    episode: Episode


class Spikes:
    def __init__(self, device: torch.device, train: TrainIdentity):
        self._settings, self._max_bad = train.spikes, train.max_skipped_steps_in_a_row
        self._past: deque[tuple[float, float]] = deque(maxlen=train.spikes.window_steps)
        self.phase = self._phase_of_past = 0  # another mixture or length has another usual loss
        self._device = device
        self._late = DelayedReader(device)
        # (step, phase) of the rows that are not judged yet, and the rows of steps before a resume
        self._waiting: deque[tuple[int, int]] = deque()
        self._resumed: list[list[float]] = []
        self.episode: Episode | None = None

    def look(self, step: int, loss: Tensor, gradient_norm: Tensor) -> Verdict | None:
        """Take a step's loss and norm. Return a verdict, on a GPU one step later, or None."""
        self._waiting.append((step, self.phase))
        read = self._late.read(torch.stack((loss.float(), gradient_norm.float())))
        rows, self._resumed = [*self._resumed, *([] if read is None else [read])], []
        verdicts = [self._judge(*self._waiting.popleft(), *row) for row in rows]
        return next((verdict for verdict in verdicts if verdict is not None), None)

    def accept(self) -> None:
        self.episode = None
        self._past.clear()

    def plain_state(self) -> dict[str, object]:
        """Return the state for a checkpoint. Waits for the device."""
        rows = [*self._resumed, *self._late.unread()]
        state = {
            "phase": self._phase_of_past,
            "past": list(self._past),
            "episode": None if self.episode is None else asdict(self.episode),
            "waiting": [[*of, *row] for of, row in zip(self._waiting, rows, strict=False)],
        }
        return _each(state, lambda v: "inf" if isinstance(v, float) and not math.isfinite(v) else v)

    def restore(self, state: Mapping[str, Any]) -> None:
        empty: dict[str, Any] = {"phase": 0, "past": [], "episode": None, "waiting": []}
        state = empty | _each(dict(state), lambda value: math.inf if value == "inf" else value)
        self._late = DelayedReader(self._device)
        self._waiting = deque((step, phase) for step, phase, *_ in state["waiting"])
        self._resumed = [row for _, _, *row in state["waiting"]]
        self._phase_of_past = state["phase"]
        self._past.clear()
        self._past.extend(tuple(row) for row in state["past"])
        self.episode = None if state["episode"] is None else Episode(**state["episode"])

    def _judge(self, step: int, phase: int, loss: float, norm: float) -> Verdict | None:
        if phase != self._phase_of_past:
            self._phase_of_past = phase
            self.accept()
        if has_no_label(loss, norm):  # it says nothing about the usual loss, nor about an open episode
            return None
        if len(self._past) < self._settings.window_steps:
            self._past.append((loss, norm))
            return None
        loss, norm = (value if math.isfinite(value) else math.inf for value in (loss, norm))
        is_finite = loss < math.inf and norm < math.inf
        losses, norms = np.array(self._past).T
        is_loss_high = not is_finite or is_high(loss, losses, self._settings.threshold, LEAST_LOSS_RISE)
        is_norm_high = is_finite and is_norm_too_large(norm, norms, self._settings.threshold)
        episode = self.episode
        if episode is None:
            if not (is_loss_high or is_norm_high):
                self._past.append((loss, norm))
                return None
            usual = usual_and_deviation(losses)[0], usual_and_deviation(norms)[0]
            episode = Episode(step, step, *usual, worst_step=step, worst_loss=loss, worst_norm=norm)
            self.episode = episode
        return self._follow(episode, step, (loss, norm), is_loss_high, is_norm_high)

    def _follow(
        self, episode: Episode, step: int, row: tuple[float, float], is_loss_high: bool, is_norm_high: bool
    ) -> Verdict | None:
        loss, norm = row
        is_finite = loss < math.inf and norm < math.inf
        episode.not_finite = 0 if is_finite else episode.not_finite + 1
        if is_loss_high or is_norm_high:
            episode.last_step, episode.calm_steps = step, 0
            episode.high_steps += 1
            episode.loss_steps += is_loss_high
            if loss > episode.worst_loss:
                episode.worst_step, episode.worst_loss, episode.worst_norm = step, loss, norm
        else:
            episode.calm_steps += 1
            self._past.append(row)
        if episode.not_finite >= self._max_bad:
            return Verdict("harmful", step, replace(episode))
        if episode.calm_steps >= CALM_STEPS:
            self.episode = None
            return Verdict("passed", step, episode) if episode.high_steps >= FEWEST_STEPS else None
        if step - episode.first_step + 1 < self._settings.wait_steps:
            return None
        is_harmful = 2 * episode.loss_steps >= self._settings.wait_steps
        if not is_harmful and episode.high_steps < FEWEST_STEPS:
            return None
        return Verdict("harmful" if is_harmful else "norm", step, replace(episode))


def steps_to_pass_over(episode: Episode) -> tuple[int, int]:
    """Return the first and last step to pass over, from the step whose update first shows in the loss."""
    return max(1, episode.first_step - 1), episode.last_step


def is_high(value: float, past: np.ndarray, threshold: float, least_rise: float) -> bool:
    """Return True if `value` is `threshold` deviations and `least_rise`, a share, above the usual value."""
    usual, deviation = usual_and_deviation(past)
    return value > usual + max(threshold * deviation, least_rise * abs(usual))


def is_norm_too_large(norm: float, past: Sequence[float] | np.ndarray, threshold: float) -> bool:
    """Return True if a gradient norm is more than twice the usual norm, and stands out of the noise."""
    usual, deviation = usual_and_deviation(np.log(np.maximum(past, 1e-30)))
    return math.log(max(norm, 1e-30)) > usual + max(threshold * deviation, LEAST_NORM_RISE)


def usual_and_deviation(past: np.ndarray) -> tuple[float, float]:
    """Return the median of the finite values and their deviation, or NaN, above which nothing is."""
    finite = past[np.isfinite(past)]
    if not len(finite):
        return math.nan, math.nan
    usual = np.median(finite)
    return float(usual), STANDARD_DEVIATION_BY_MAD * float(np.median(np.abs(finite - usual)))


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _each(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_each(entry, change) for entry in value]
    return change(value)


@dataclass
class SpikeWatch:
    """The answer to spikes: report a spike that passed, go back for a harmful spike, or stop the run.

    A run stops after going back `max_tries` times for spikes that follow on each other. PaLM (Chowdhery et
    al. 2022, section 5.1) and LLM-jp went back by hand in this way.
    """

    spikes: Spikes
    resolved: Resolved
    go_back_before: Callable[[int], bool]  # `ReplicaCheck`'s
    went_back: Callable[[], Sequence[WentBack]]  # earlier spikes
    write: Callable[[Row], None]
    alert: Callable[[int, str], None]
    harmful: Episode | None = None  # to go back for, until the run went

    @property
    def _settings(self) -> SpikeSettings:
        return self.resolved.identity.train.spikes

    def after_step(self, taken: TakenStep) -> Answer:
        verdict = self.spikes.look(taken.step, taken.loss, taken.gradient_norm)
        if verdict is None:
            return "continue"
        if verdict.kind == "harmful" and self._settings.response == "go_back":
            self._refuse_more_tries(verdict)
            if self.go_back_before(steps_to_pass_over(verdict.episode)[0]):
                self.harmful = verdict.episode
                return "go back"
        if not verdict.episode.not_finite:  # else the guard ends the run
            self._report(taken.step, verdict)
        return "continue"

    def described(self, episode: Episode) -> str:
        """Return e.g. "the loss rose to 7.2 (usual: 2.5) in steps 812 to 841, …". All ranks call it."""
        step = episode.worst_step
        documents = Agreement().on_first(lambda: self._documents(step))
        return (
            f"the loss rose to {episode.worst_loss:.4g} (usual: {episode.usual_loss:.4g}) and the gradient "
            f"norm to {episode.worst_norm:.3g} (usual: {episode.usual_norm:.3g}) in steps "
            f"{episode.first_step} to {episode.last_step}, most in step {step}, with text of "
            f"{documents} (all of it: `kielo data RECIPE --step {step}`)"
        )

    def row(self, episode: Episode, step: int, outcome: str) -> Spike:
        return Spike(
            step=step,
            spike_from=episode.first_step,
            spike_to=episode.last_step,
            outcome=outcome,
            highest_loss=episode.worst_loss,
            usual_loss=episode.usual_loss,
            highest_loss_step=episode.worst_step,
        )

    def _report(self, step: int, verdict: Verdict) -> None:
        is_over = verdict.kind == "passed"
        self.write(self.row(verdict.episode, step, "passed" if is_over else "told"))
        if is_over:
            ending = "It passed by itself"
        elif verdict.kind == "norm":
            ending = "The loss recovered, the norm did not, and training continues"
        elif self._settings.response == "tell":
            ending = 'It lasts, and training continues because train.spikes.response = "tell"'
        else:
            ending = "It lasts, and training continues because there is no checkpoint from before it"
        self.alert(step, f"{self.described(verdict.episode)}. {ending}")
        if not is_over:
            self.spikes.accept()

    def _refuse_more_tries(self, verdict: Verdict) -> None:
        episode, most = verdict.episode, self._settings.max_tries
        first_step, last_step = steps_to_pass_over(episode)
        if self._tries_before(first_step) < most:
            return
        raise KieloError(
            f"step {verdict.step}: {self.described(episode)}. The run went back {most} times for spikes that "
            f"follow on each other (train.spikes.max_tries = {most}), so it stops. Fix: look at these "
            f"documents and set train.skip_steps = [[{first_step}, {last_step}]] and more, "
            "train.spikes.learning_rate_factor = 0.5, or more train.spikes.max_tries. The same command then "
            "resumes from the newest checkpoint"
        )

    def _tries_before(self, first_step: int) -> int:
        """Count the spikes gone back for of which each begins within a window of the next."""
        tries = 0
        for spike in reversed(self.went_back()):
            if first_step - spike.last_step > self._settings.window_steps:
                break
            tries, first_step = tries + 1, spike.first_step
        return tries

    def _documents(self, step: int) -> str:
        """Return e.g. "books (a.txt:3, a.txt:9 and 12 more) and web (b.txt:1)"."""
        identity, placement = self.resolved.identity, self.resolved.placement
        try:
            folder, end = Path(placement.tokens_folder), placement.end_of_text_id
            phase, longest = identity.phases[identity.phase_index(step)], identity.longest_sequence_length
            rows = documents_of_step(folder, identity.seed, phase, longest, end, step, lambda ids: "")
        except (KieloError, OSError) as error:  # a message must not end the run
            return f"documents that could not be read ({error})"
        by_source: dict[str, list[str]] = {}
        for row in rows:
            by_source.setdefault(row["source"], []).append(str(row["document"]))
        return " and ".join(
            f"{source} ({some(list(dict.fromkeys(ids)), NAMED_DOCUMENTS)})"
            for source, ids in sorted(by_source.items())
        )
