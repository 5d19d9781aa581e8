"""Watches for silently wrong values: replicas are compared every K steps and before each save.

A bit that flips in a weight, a moment or a reduced gradient of one rank changes no loss that anyone would
notice, and stays. Since each save follows a comparison, every checkpoint is from before a difference that is
found: the run goes back to the newest one (`go_back.py`). A rank that is found twice ends the run.
"""

import socket
from collections.abc import Callable

from kielo.checkpoint.agreement import Agreement
from kielo.parallel.replicas import Difference, Replicas
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import TrainPlacement
from kielo.train.watch.checks import Answer, TakenStep

_NAMED_TENSORS = 4


class ReplicaCheck:
    """Compare replicas; "go back": a checkpoint from before the step is the newest now.

    Raises KieloError if there is none, and for ranks that may be those of an earlier difference.

    found: says what differed, until the run went back; else "". go_back_before: makes the newest checkpoint
    from before a step the newest; False if there is none.
    """

    def __init__(self, train: TrainPlacement, go_back_before: Callable[[int], bool]):
        self.found = ""
        self._every_steps, self._go_back_before = train.compare_replicas_every_steps, go_back_before
        self._blamed_before: set[int] = set()

    def after_step(self, taken: TakenStep) -> Answer:
        return self._compared(taken.step, taken.replicas) if self._is_due(taken.step) else "go on"

    def before_keeping(self, taken: TakenStep) -> Answer:
        """Compare, unless `after_step` has compared in this step. All ranks call it together."""
        if not self._every_steps or self._is_due(taken.step):
            return "go on"
        return self._compared(taken.step, taken.replicas)

    def _is_due(self, step: int) -> bool:
        return bool(self._every_steps) and step % self._every_steps == 0

    def _compared(self, step: int, replicas: Replicas) -> Answer:
        differences = replicas.differences() if replicas.exist else []
        if not differences:
            return "go on"
        ranks = {rank for difference in differences for rank in difference.ranks}
        found = f"replicas differ: {_described(differences)}"
        if ranks & self._blamed_before:
            raise KieloError(
                f"step {step}: {found}; it is not the first time in this job, so it stops. What helps: leave "
                "that node out; the same command goes on from the newest checkpoint"
            )
        self._blamed_before |= ranks
        if not self._go_back_before(step):
            raise KieloError(
                f"step {step}: {found}, and no checkpoint was saved before; the same command begins at step 0"
            )
        self.found = found
        return "go back"


def _described(differences: list[Difference]) -> str:
    """Return e.g. "model/norm.weight on rank 2 (nid1)". All ranks call it."""
    hosts = Agreement().gather(socket.gethostname())
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for difference in differences:
        by_ranks.setdefault(difference.ranks, []).append(difference.name)
    parts = []
    for ranks, names in sorted(by_ranks.items()):
        more = f" and {len(names) - _NAMED_TENSORS} more" if len(names) > _NAMED_TENSORS else ""
        where = " or ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks)
        parts.append(f"{', '.join(sorted(names)[:_NAMED_TENSORS])}{more} on {where}")
    return "; ".join(parts)
