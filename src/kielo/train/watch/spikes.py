"""Watches loss and gradient norm for spikes: rises that stand out of the noise of the steps before them.

In: loss and gradient norm of each step, the same on every rank. Out: verdicts, the same on every rank: a
spike that passed by itself, a lasting rise, or one that the run should go back from (`go_back.py`
does). The usual value is the median of the last steps, and their noise 1.4826 × their median absolute
deviation, which is the standard deviation of Gaussian noise (Rousseeuw and Croux 1993): up to half of the
steps may be odd before either moves. Gradient norms are compared by their logarithms, as their noise grows
with their size.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kielo.recipe.sections import TrainIdentity
from kielo.train.watch.delayed_reader import DelayedReader
from kielo.train.watch.guard import has_no_label

LEAST_LOSS_RISE = 0.02  # of the usual loss; noise may be next to none in a run that knows its text by heart
LEAST_NORM_RISE = math.log(2)
CALM_STEPS = 5  # this many usual steps in a row end a spike
FEWEST_STEPS = 3  # of a spike; fewer are outliers, which heavy-tailed noise has too
STANDARD_DEVIATION_BY_MAD = 1.4826


@dataclass
class Episode:
    """Steps from the first one that stood out.

    high_steps: how many of them stood out; loss_steps: by their loss. not_finite: the steps up to the last
    that were not finite, in a row. usual_loss, usual_norm: before the first. worst_step: that of
    the highest loss.
    """

    first_step: int
    last_step: int
    usual_loss: float
    usual_norm: float
    worst_step: int
    worst_loss: float
    worst_norm: float
    high_steps: int = 0
    loss_steps: int = 0
    calm_steps: int = 0
    not_finite: int = 0


@dataclass(frozen=True)
class WentBack:
    """A spike that the run went back for: the steps that are passed over, and the factor of later rates.

    learning_rate_factor: of the steps from the first on.
    """

    first_step: int
    last_step: int
    learning_rate_factor: float


@dataclass(frozen=True)
class Verdict:
    """The kind of an episode at `step`; "harmful": its loss stayed high, or was not finite too often."""

    kind: Literal["passed", "norm", "harmful"]
    step: int
    episode: Episode


class Spikes:
    """The last steps' losses and norms, and the episode that is open. Phases are not compared: see `use`."""

    def __init__(self, device: torch.device, train: TrainIdentity):
        self._settings, self._max_bad = train.spikes, train.max_skipped_steps_in_a_row
        self._past: deque[tuple[float, float]] = deque(maxlen=train.spikes.window_steps)
        self._phase = 0
        self._phase_of_past = 0
        self._device = device
        self._late = DelayedReader(device)
        # (step, phase) of the rows that were not judged yet; of those before a resume, the row too
        self._waiting: deque[tuple[int, int]] = deque()
        self._resumed: list[list[float]] = []
        self.episode: Episode | None = None

    def use(self, phase: int) -> None:
        """Say which phase the next steps are of. Another mixture or length has another usual loss."""
        self._phase = phase

    def look(self, step: int, loss: Tensor, gradient_norm: Tensor) -> Verdict | None:
        """Take a step's loss and norm; return a verdict when there is one, on a GPU a step later."""
        self._waiting.append((step, self._phase))
        read = self._late.read(torch.stack((loss.float(), gradient_norm.float())))
        rows, self._resumed = [*self._resumed, *([] if read is None else [read])], []
        verdicts = [self._judge(*self._waiting.popleft(), *row) for row in rows]
        return next((verdict for verdict in verdicts if verdict is not None), None)

    def accept(self) -> None:
        """Take the present level for the usual one: closes the episode and forgets the past."""
        self.episode = None
        self._past.clear()

    def plain_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Waits for the device."""
        episode = None if self.episode is None else asdict(self.episode)
        waiting = [[*of, *row] for of, row in zip(self._waiting, [*self._resumed, *self._late.unread()])]
        return _for_json({
            "phase": self._phase_of_past, "past": list(self._past), "episode": episode, "waiting": waiting,
        })  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a checkpoint's state; {}, of a version that had none, begins with no past."""
        state = {"phase": 0, "past": [], "episode": None, "waiting": []} | _from_json(dict(state))
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
        if has_no_label(loss, norm):  # which says nothing of the usual loss, nor of an open episode
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
            usual = usual_value(losses), usual_value(norms)
            episode = Episode(step, step, *usual, worst_step=step, worst_loss=loss, worst_norm=norm)
            self.episode = episode
        return self._follow(episode, step, (loss, norm), is_loss_high, is_norm_high)

    def _follow(
        self, episode: Episode, step: int, row: tuple[float, float], is_loss_high: bool, is_norm_high: bool
    ) -> Verdict | None:
        """Add a step to the open episode, and judges that."""
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
    """Return the first and last of the steps whose text is passed over when a run goes back for an episode.

    The step before the first is among them: it is that step's update which first shows in the loss.
    """
    return max(1, episode.first_step - 1), episode.last_step


def usual_value(past: np.ndarray) -> float:
    """Return the median of the finite values; NaN where there is none."""
    finite = past[np.isfinite(past)]
    return float(np.median(finite)) if len(finite) else math.nan


def is_high(value: float, past: np.ndarray, threshold: float, least_rise: float) -> bool:
    """Return True if `value` is more than `threshold` deviations above the usual value of `past`.

    least_rise: as a share of the usual value; a smaller rise is none.
    """
    usual, deviation = _usual_and_deviation(past)
    return value > usual + max(threshold * deviation, least_rise * abs(usual))


def is_norm_too_large(norm: float, past: Sequence[float] | np.ndarray, threshold: float) -> bool:
    """Return True if a gradient norm is more than twice the usual one, and stands out of the noise."""
    logs = np.log(np.maximum(past, 1e-30))
    usual, deviation = _usual_and_deviation(logs)
    return math.log(max(norm, 1e-30)) > usual + max(threshold * deviation, LEAST_NORM_RISE)


def _usual_and_deviation(past: np.ndarray) -> tuple[float, float]:
    finite = past[np.isfinite(past)]
    if not len(finite):
        return math.nan, math.nan  # nothing is higher
    usual = np.median(finite)
    return float(usual), STANDARD_DEVIATION_BY_MAD * float(np.median(np.abs(finite - usual)))


def _for_json(value: Any) -> Any:
    """Return the state with the text "inf" for each number that is not finite, which JSON lacks."""
    match value:
        case dict():
            return {key: _for_json(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_for_json(entry) for entry in value]
        case float() if not math.isfinite(value):
            return "inf"
    return value


def _from_json(value: Any) -> Any:
    match value:
        case dict():
            return {key: _from_json(entry) for key, entry in value.items()}
        case list():
            return [_from_json(entry) for entry in value]
    return math.inf if value == "inf" else value
