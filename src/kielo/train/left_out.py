"""Sequences that cannot be read in mid-run: all ranks leave out the same ones, and they are written down.

In: what each rank could not read of a step. Out: the samples that all of them leave out, rows of the log,
alerts, and entries of the run's state, which every checkpoint keeps. A rank that reads the same sequences as
another one must leave them out too, although its own disk may give them.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from kielo.artifact.metrics import LeftOutSequence
from kielo.checkpoint.agreement import Agreement
from kielo.dataset.batches import Unreadable
from kielo.recipe.errors import KieloError
from kielo.train.state import State

_MOST_NAMED = 5
_WHAT_WORKS = (
    "What would work: a whole copy of the file in its place, and the same command, which goes on from the "
    "newest checkpoint; or train.max_left_out_sequences, with which training goes on without such sequences"
)


class LeftOut:
    """Leaves out up to `most` sequences of a run; with 0 the first one that cannot be read ends it.

    group: of all ranks, on the CPU; None: one rank, or nothing is left out. write: takes a row of the log.
    alert: (step, message), on one rank.
    """

    def __init__(
        self,
        most: int,
        state: State,
        group: dist.ProcessGroup | None,
        write: Callable[[LeftOutSequence], None],
        alert: Callable[[int, str], None],
    ):
        self._most, self._state, self._group = most, state, group
        self._write, self._alert = write, alert

    def agree(self, sequences: int, step: int, unreadable: Sequence[Unreadable]) -> frozenset[int]:
        """Returns the samples of a step that all ranks leave out; every rank calls it for the same steps.

        sequences: of the whole step. Raises KieloError for more than may be left out, and for a step of which
        nothing is left.
        """
        if not self._most:
            if unreadable:
                raise KieloError(f"step {step}: {_described(unreadable)}. {_WHAT_WORKS}")
            return frozenset()
        found = self._of_all_ranks(unreadable)
        if not found:
            return frozenset()
        for one in found:
            entry = {"step": step, "sample": one.sample, "source": one.source, "ranges": list(one.ranges)}
            self._state.left_out.append(entry | {"documents": list(one.documents)})
            self._write(
                LeftOutSequence(
                    step=step,
                    left_out_sample=one.sample,
                    source=one.source,
                    documents=list(one.documents),
                    reason=one.reason,
                )
            )
        number = len(self._state.left_out)
        so_far = f"{number} of at most {self._most} (train.max_left_out_sequences)"
        self._alert(step, f"{_described(found)}; left out, {so_far}")
        if number > self._most:
            raise KieloError(f"step {step}: {_described(found)}; these would be {so_far}. {_WHAT_WORKS}")
        if len(found) == sequences:
            raise KieloError(
                f"step {step}: no sequence of it can be read; {_described(found)}. {_WHAT_WORKS}"
            )
        return frozenset(one.sample for one in found)

    def _of_all_ranks(self, unreadable: Sequence[Unreadable]) -> list[Unreadable]:
        """Returns what any rank could not read, by sample."""
        if self._group is None:
            return sorted(unreadable, key=lambda one: one.sample)
        number = torch.tensor([len(unreadable)])
        dist.all_reduce(number, group=self._group)
        if not number.item():
            return []
        by_sample = {one.sample: one for of in Agreement(self._group).gather(unreadable) for one in of}
        return [by_sample[sample] for sample in sorted(by_sample)]


def _described(found: Sequence[Unreadable]) -> str:
    """Returns e.g. "sample 12 of books (a.txt:3, a.txt:9): books.bin: ends at byte 4,096 …, and 3 more"."""
    first = found[0]
    names = ", ".join(first.documents[:_MOST_NAMED])
    more = f", {len(first.documents) - _MOST_NAMED} more" if len(first.documents) > _MOST_NAMED else ""
    others = f", and {len(found) - 1} more sequences" if len(found) > 1 else ""
    documents = f" ({names}{more})" if names else ""
    return f"sample {first.sample} of {first.source}{documents}: {first.reason}{others}"
