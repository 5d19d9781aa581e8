"""Loss on held-out text: the same sequences every time, shared out over the data ranks.

In: the held-out sequences of a token folder. Out: nats per counted token, the same number on every rank, and
the same (to rounding) on any number of ranks.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from kielo.artifact.metrics import HeldOutLoss
from kielo.dataset.batches import NOT_COUNTED, Batch
from kielo.parallel.shard import forward_only
from kielo.train.feed import cut, to_device
from kielo.train.forward_backward import ForwardBackward
from kielo.train.state import State


class HeldOut:
    """Rank r of n scores sequences r, r + n, … of `batch`, which holds all held-out sequences."""

    def __init__(
        self,
        batch: Batch,
        data_rank: int,
        data_ranks: int,
        sum_over_data: Callable[[Tensor], Tensor],
        micro_batch_sequences: int,
        forward_backward: ForwardBackward,
        every_steps: int,
        total_steps: int,
        device: torch.device,
        model: nn.Module,
        positions_s: Tensor | None = None,
    ):
        self._counted_tokens = int((batch.labels != NOT_COUNTED).sum())
        inputs, labels, documents = (
            None if array is None else _share(array, data_rank, data_ranks, padding)
            for array, padding in ((batch.inputs, 0), (batch.labels, NOT_COUNTED), (batch.documents, 0))
        )
        self._micro_batches = cut(inputs, labels, documents, micro_batch_sequences, positions_s)
        self._sum_over_data = sum_over_data
        self._forward_backward = forward_backward
        self._every_steps = every_steps
        self._total_steps = total_steps
        self._device = device
        self._model = model
        self._scored: tuple[int, float] | None = None  # step, loss

    def due(self, step: int) -> bool:
        return step % self._every_steps == 0 or step == self._total_steps

    def row(self, state: State) -> HeldOutLoss:
        """Returns the log's row of the loss on held-out text. Waits for the device."""
        return HeldOutLoss(step=state.step, tokens=state.tokens, heldout_loss=self.loss_at(state))

    def loss_at(self, state: State) -> float:
        """`score`, once a step."""
        if self._scored is None or self._scored[0] != state.step:
            self._scored = (state.step, self.score())
        return self._scored[1]

    def score(self) -> float:
        """Mean nats per counted token, without z-loss. All ranks call it together."""
        model = self._model
        divisor = torch.tensor(float(max(self._counted_tokens, 1)), device=self._device)
        loss = torch.zeros((), device=self._device)
        with forward_only(model):
            for piece in self._micro_batches:
                loss += self._forward_backward.score(to_device(piece, self._device), divisor, z_loss=0.0)
        return self._sum_over_data(loss).item()


def _share(array: np.ndarray, data_rank: int, data_ranks: int, padding: int) -> np.ndarray:
    """Every rank gets the same number of rows, if need be some that do not count: a forward is a collective
    act.
    """
    missing = -len(array) % data_ranks
    filled = np.concatenate([array, np.full((missing, *array.shape[1:]), padding, dtype=array.dtype)])
    return filled[data_rank::data_ranks]
