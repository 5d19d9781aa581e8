"""How far rounding alone takes the losses of two trainings apart: transformers against itself.

Two correct engines add in different orders, so their gradients differ in the last bits. AdamW divides an
element's gradient by its own size: where that is near zero, rounding decides the sign, and the weight moves
by the learning rate up or down. How fast losses part by that depends on the learning rate, the text, the
weights and the processor, so that no fixed tolerance holds for all. So it is measured: transformers trains
again from weights that are moved by one unit in the last place.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kielo.train.feed import Feed
from kielo.verify.hugging_face_side import HuggingFaceSide

TRAININGS = 3  # how far one parts by some step was seen to vary six-fold with its seed


def rounding_differences(
    begin: Callable[[], tuple[HuggingFaceSide, Feed]], losses: Sequence[float]
) -> list[float]:
    """Trains transformers from nudged weights; returns its largest relative difference up to each step.

    begin: builds the side and its feed anew, as they were before the first step. losses: those of the side
    without a nudge, nats per token, one for each step.
    """
    largest = [0.0] * len(losses)
    for seed in range(TRAININGS):
        side, feed = begin()
        nudge(side.model.parameters(), seed)
        try:
            for number, loss in enumerate(losses):
                nudged = side.backward(feed.take(number + 1))
                side.update()
                largest[number] = max(largest[number], relative_loss_difference(nudged, loss))
        finally:
            feed.close()
    return list(accumulate(largest, max))


@torch.no_grad()
def nudge(weights: Iterable[Tensor], seed: int) -> None:
    """Multiplies each element, in place, by 1 + ε or 1 − ε by chance, where ε is that of its dtype."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        weight.mul_(1 + torch.finfo(weight.dtype).eps * signs.to(weight))


def relative_loss_difference(ours: float, theirs: float) -> float:
    """Computes |ours − theirs| / |theirs|."""
    return abs(ours - theirs) / max(abs(theirs), 1e-30)
