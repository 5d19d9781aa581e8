"""A step's row for the log: tensors on the device → plain numbers. Making it waits for the device."""

from torch import Tensor

from kielo.artifact.metrics import PassedOver, TrainingStep
from kielo.train.guard import Guard, has_no_label
from kielo.train.meter import Meter
from kielo.train.state import State


class StepRow:
    """`phase`: the number of the one that steps are of."""

    def __init__(self, meter: Meter, guard: Guard):
        self.phase = 1
        self._meter = meter
        self._guard = guard

    def __call__(
        self, state: State, loss: Tensor, gradient_norm: Tensor, learning_rate: float
    ) -> TrainingStep:
        """Returns the row of this step: its own loss and norm, the speed since the last row.

        Its loss is None if no label of the step counts.
        """
        # waits for the device, and so must come before the meter is read
        loss_of_step, norm = loss.item(), gradient_norm.item()
        return TrainingStep(
            step=state.step,
            tokens=state.tokens,
            samples=state.samples,
            phase=self.phase,
            loss=None if has_no_label(loss_of_step, norm) else loss_of_step,
            gradient_norm=norm,
            learning_rate=learning_rate,
            **self._meter.lap(state.tokens),
            skipped=self._guard.skipped,
            without_labels=self._guard.without_labels,
        )


def passed_over_row(state: State, phase: int, first_step: int, reason: str) -> PassedOver:
    """Returns the row of the steps that were passed over, from `first_step` to the state's."""
    return PassedOver(
        step=state.step,
        tokens=state.tokens,
        samples=state.samples,
        phase=phase,
        passed_over_from=first_step,
        passed_over_for=reason,
    )
