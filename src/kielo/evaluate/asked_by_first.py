"""A contender over several ranks that rank 0 asks alone. The other ranks compute what it asks for.

Files of tasks, their data, their random numbers and the disk for results are then rank 0's alone, and an
error in any of them is raised on every rank.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kielo.checkpoint.agreement import Agreement
from kielo.evaluate.contender import Contender
from kielo.ranks import objects
from kielo.recipe.errors import KieloError, sentence

T = TypeVar("T")
_END = "end"


def asked_by_first(contender: Contender, work: Callable[[Contender], T]) -> T:
    """Call `work` on rank 0, whose contender computes on all ranks. Return its result on every rank.

    All ranks call it together. If `work` raises, the other ranks raise KieloError with the error, and rank 0
    too if the disk failed, so that all continue together. An error inside of a computation is raised only on
    its own rank, because the others wait inside of it too.
    """
    ranks = Agreement()
    if ranks.size == 1:
        return work(contender)
    if ranks.rank:
        found_there: T = _answer(contender)
        return found_there
    first = _First(contender)
    losses = None if contender.losses is None else first.losses
    try:
        found = work(replace(contender, logits=first.logits, losses=losses))
    except Exception as error:
        if first.is_computing:
            raise
        reason = sentence(error) or f"{type(error).__name__}: {error}"
        objects.broadcast((_END, [None, reason]))
        if isinstance(error, OSError):
            raise KieloError(f"rank 0: {reason}") from error
        raise
    objects.broadcast((_END, [found, None]))
    return found


class _First:
    """Rank 0's calls of a contender. Each is sent to the other ranks, which make it too."""

    def __init__(self, contender: Contender) -> None:
        self._contender, self.is_computing = contender, False

    def logits(self, tokens_bs: Tensor, documents_bs: Tensor | None) -> Tensor:
        return self._compute("logits", tokens_bs, documents_bs)

    def losses(self, tokens_bs: Tensor, documents_bs: Tensor | None, labels_bs: Tensor) -> Tensor:
        return self._compute("losses", tokens_bs, documents_bs, labels_bs)

    def _compute(self, kind: str, *tensors: Tensor | None) -> Tensor:
        self.is_computing = True
        objects.broadcast((kind, [None if one is None else one.cpu().numpy() for one in tensors]))
        result: Tensor = getattr(self._contender, kind)(*tensors)
        self.is_computing = False
        return result


@torch.no_grad()
def _answer(contender: Contender) -> Any:
    """Compute what rank 0 asks for, until it ends. Return the result of its work."""
    while True:
        kind, content = objects.broadcast(None)
        if kind == _END:
            found, error = content
            if error is not None:
                raise KieloError(f"rank 0: {error}")
            return found
        tensors = [None if one is None else torch.from_numpy(one).to(contender.device) for one in content]
        getattr(contender, kind)(*tensors)
