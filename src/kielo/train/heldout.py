"""Loss on held-out text: nats per counted token and bits per byte of each set, the same on every rank."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from kielo.artifact.metrics import HeldOutLoss, HeldOutScore
from kielo.dataset.batches import NOT_COUNTED, Batch
from kielo.dataset.heldout_sets import HeldoutSet
from kielo.parallel.fsdp import forward_only
from kielo.train.feed import MicroBatch, cut, to_device
from kielo.train.forward_backward import ForwardBackward
from kielo.train.state import State


@dataclass(frozen=True)
class HeldOutShare:
    micro_batches: list[MicroBatch]
    counted_tokens: int


def share_of(
    batch: Batch,
    data_rank: int,
    data_ranks: int,
    micro_batch_sequences: int,
    positions_s: Tensor | None = None,
) -> HeldOutShare:
    """Cut sequences r, r + n, … of all held-out sequences, for rank r of n. positions_s: its columns."""

    def share(array: np.ndarray, padding: int) -> np.ndarray:
        # filled up, because all ranks must take part in each forward
        fill = np.full((-len(array) % data_ranks, *array.shape[1:]), padding, dtype=array.dtype)
        return np.concatenate([array, fill])[data_rank::data_ranks]

    documents = None if batch.documents is None else share(batch.documents, 0)
    inputs, labels = share(batch.inputs, 0), share(batch.labels, NOT_COUNTED)
    own = Batch(inputs, labels, documents, batch.samples[data_rank::data_ranks])
    micro_batches = cut(own, micro_batch_sequences, positions_s)
    return HeldOutShare(micro_batches, int((batch.labels != NOT_COUNTED).sum()))


@dataclass(frozen=True)
class HeldOutText:
    """A held-out set and this rank's share. has_bits: its loss predicts each token from the tokens before."""

    of: HeldoutSet
    share: HeldOutShare
    has_bits: bool = True

    def score(self, loss: float | None) -> HeldOutScore:
        """Return the score of a loss in nats per token. The loss is None if no token counts."""
        per_byte = self.of.tokens_per_byte if self.has_bits else None
        bits = None if per_byte is None or loss is None else loss / math.log(2) * per_byte
        return HeldOutScore(loss=loss, bits_per_byte=bits, languages=list(self.of.languages))


@dataclass
class HeldOut:
    """A `Periodic` that scores the held-out texts, the first of which contains all sources."""

    texts: Sequence[HeldOutText]
    model: nn.Module
    forward_backward: ForwardBackward
    sum_over_data: Callable[[Tensor], Tensor]
    device: torch.device
    every_steps: int
    total_steps: int
    name: ClassVar[str] = "held-out text"
    _scored: tuple[int, float | None] | None = None  # step, loss of the first text

    def due(self, step: int) -> bool:
        return step % self.every_steps == 0 or step == self.total_steps

    def is_owed(self, step: int) -> bool:
        return False

    def row(self, state: State) -> HeldOutLoss:
        whole, *others = self.texts
        loss = self._loss(whole.share)  # computed again: a run that went back takes a step twice
        self._scored = state.step, loss
        score = whole.score(loss)
        row = HeldOutLoss(
            step=state.step,
            tokens=state.tokens,
            heldout_loss=score.loss,
            heldout_bits_per_byte=score.bits_per_byte,
        )
        if not others:
            return row
        scores = {text.of.name: text.score(self._loss(text.share)) for text in others}
        return row.model_copy(update={"heldout_sets": scores})

    def loss_at(self, state: State) -> float | None:
        """Return the loss of the first text at this step, computed once, or None if no token counts."""
        if self._scored is None or self._scored[0] != state.step:
            self._scored = (state.step, self._loss(self.texts[0].share))
        return self._scored[1]

    def _loss(self, share: HeldOutShare) -> float | None:
        """Compute the mean nats per counted token, without z-loss. All ranks call it together."""
        if not share.counted_tokens:
            return None
        divisor = torch.tensor(float(share.counted_tokens), device=self.device)
        loss = torch.zeros((), device=self.device)
        with forward_only(self.model):
            for micro_batch in share.micro_batches:
                on_device = to_device(micro_batch, self.device)
                loss += self.forward_backward.score(on_device, divisor, z_loss=0.0)
        return self.sum_over_data(loss).item()
