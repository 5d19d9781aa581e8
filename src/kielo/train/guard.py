"""Keeps a run sane: a step whose loss or gradient norm is not finite is not taken, and a run of them ends the run.

In: the loss and the global gradient norm of a step, the same on every rank. Out: a flag on the device for the
optimiser, counts for the log, and KieloError once too many steps in a row were bad.
"""

import torch
from torch import Tensor

from kielo.recipe.errors import KieloError
from kielo.train.late import LateReader


class Guard:
    """Counts on the device, so that a sound step costs no wait; the host looks at them late (see `late.py`)."""

    def __init__(self, device: torch.device, max_in_a_row: int):
        self._max_in_a_row = max_in_a_row
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # bad in a row up to now, bad in all
        self._late = LateReader(device)

    def check(self, loss: Tensor, gradient_norm: Tensor) -> Tensor:
        """float32 scalar on the device: 1 where this step must be skipped. All ranks get the same, as both inputs do."""
        bad = ~(torch.isfinite(loss) & torch.isfinite(gradient_norm))
        self._counts[0] = (self._counts[0] + 1) * bad
        self._counts[1] += bad
        return bad.to(torch.float32)

    def stop_if_diverged(self, step: int) -> None:
        """Raise KieloError after too many bad steps in a row; on a GPU one step later than on a CPU."""
        counts = self._late.read(self._counts)
        if counts is None or counts[0] < self._max_in_a_row:
            return
        raise KieloError(
            f"step {step}: the loss or the gradient norm was not finite {int(counts[0])} steps in a row"
            f" (train.max_skipped_steps_in_a_row = {self._max_in_a_row}), so the run stops. The weights are those of the"
            " last sound step. What helps: a lower train.learning_rate, a longer train.warmup_share, or a look at the"
            f" text with `kielo data RECIPE --step {max(1, step - int(counts[0]) + 1)}`"
        )

    @property
    def skipped(self) -> int:
        """Steps skipped since step 1. Waits for the device."""
        return int(self._counts[1].item())

    def plain_state(self) -> dict[str, int]:
        in_a_row, skipped = self._counts.tolist()
        return {"in_a_row": in_a_row, "skipped": skipped}

    def restore(self, state: dict[str, int]) -> None:
        self._counts.copy_(torch.tensor([state["in_a_row"], state["skipped"]]))
