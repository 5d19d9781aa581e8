"""Loss on held-out text: the same sequences every time, shared out over the data ranks.

In: the held-out sequences of a token folder. Out: nats per counted token, the same number on every rank, and
the same (to rounding) on any number of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from kielo.artifact.metrics import HeldOutLoss
from kielo.dataset.batches import NOT_COUNTED, Batch
from kielo.parallel.fsdp import forward_only
from kielo.train.feed import MicroBatch, cut, to_device
from kielo.train.forward_backward import ForwardBackward
from kielo.train.state import State


@dataclass(frozen=True)
class HeldOutShare:
    """The held-out sequences of one rank, cut into micro-batches; counted_tokens: those of all ranks."""

    micro_batches: list[MicroBatch]
    counted_tokens: int


def share_of(
    batch: Batch,
    data_rank: int,
    data_ranks: int,
    micro_batch_sequences: int,
    positions_s: Tensor | None = None,
) -> HeldOutShare:
    """Cuts sequences r, r + n, … of `batch`, which holds all held-out sequences, for rank r of n.

    positions_s: the columns that this rank takes of each sequence; None: all.
    """
    inputs, labels, documents = (
        None if array is None else _share(array, data_rank, data_ranks, padding)
        for array, padding in ((batch.inputs, 0), (batch.labels, NOT_COUNTED), (batch.documents, 0))
    )
    micro_batches = cut(inputs, labels, documents, micro_batch_sequences, positions_s)
    return HeldOutShare(micro_batches, int((batch.labels != NOT_COUNTED).sum()))


class HeldOut:
    """Scores the held-out text every `every_steps` steps and after the last one."""

    def __init__(
        self,
        share: HeldOutShare,
        model: nn.Module,
        forward_backward: ForwardBackward,
        sum_over_data: Callable[[Tensor], Tensor],
        device: torch.device,
        every_steps: int,
        total_steps: int,
    ):
        self._share = share
        self._model = model
        self._forward_backward = forward_backward
        self._sum_over_data = sum_over_data
        self._device = device
        self._every_steps = every_steps
        self._total_steps = total_steps
        self._scored: tuple[int, float] | None = None  # step, loss

    def due(self, step: int) -> bool:
        return step % self._every_steps == 0 or step == self._total_steps

    def row(self, state: State) -> HeldOutLoss:
        """Returns the log's row of the loss on held-out text. Waits for the device."""
        return HeldOutLoss(step=state.step, tokens=state.tokens, heldout_loss=self.loss_at(state))

    def loss_at(self, state: State) -> float:
        """Returns the score at this step, computed once."""
        if self._scored is None or self._scored[0] != state.step:
            self._scored = (state.step, self.score())
        return self._scored[1]

    def score(self) -> float:
        """Computes the mean nats per counted token, without z-loss. All ranks call it together."""
        divisor = torch.tensor(float(max(self._share.counted_tokens, 1)), device=self._device)
        loss = torch.zeros((), device=self._device)
        with forward_only(self._model):
            for micro_batch in self._share.micro_batches:
                on_device = to_device(micro_batch, self._device)
                loss += self._forward_backward.score(on_device, divisor, z_loss=0.0)
        return self._sum_over_data(loss).item()


def _share(array: np.ndarray, data_rank: int, data_ranks: int, padding: int) -> np.ndarray:
    """Returns this rank's rows, filled up with `padding`: a forward is collective, so all need as many."""
    missing = -len(array) % data_ranks
    filled = np.concatenate([array, np.full((missing, *array.shape[1:]), padding, dtype=array.dtype)])
    return filled[data_rank::data_ranks]
