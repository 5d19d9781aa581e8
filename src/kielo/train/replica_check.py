"""Watches for silently wrong values: replicas are compared every K steps and before each save.

A bit that flips in a weight, a moment or a reduced gradient of one rank changes no loss that anyone would
notice, and stays. Since each save follows a comparison, every checkpoint is from before a difference that is
found: the run goes back to the newest one (`go_back.py`). A rank that is found twice ends the run.
"""

import socket

from kielo.checkpoint.agreement import Agreement
from kielo.parallel.replicas import Difference, Replicas
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import TrainPlacement
from kielo.train.state import RunCheckpoints

_NAMED_TENSORS = 4


class ReplicaCheck:
    """`found`: says what differed, from `must_go_back` until the run went back; else ""."""

    def __init__(self, train: TrainPlacement, checkpoints: RunCheckpoints):
        self.found = ""
        self._every_steps, self._checkpoints = train.compare_replicas_every_steps, checkpoints
        self._blamed_before: set[int] = set()

    def must_go_back(self, step: int, replicas: Replicas, is_saving: bool) -> bool:
        """Returns True, and makes a checkpoint from before `step` the newest, if replicas differ.

        All ranks call it after each step and get the same. Raises KieloError where there is none, and for
        ranks that may be those of an earlier difference.
        """
        if not self._every_steps or not replicas.exist or (step % self._every_steps and not is_saving):
            return False
        differences = replicas.differences()
        if not differences:
            return False
        ranks = {rank for difference in differences for rank in difference.ranks}
        found = f"replicas differ: {_described(differences)}"
        if ranks & self._blamed_before:
            raise KieloError(
                f"step {step}: {found}; it is not the first time in this job, so it stops. What helps: leave "
                "that node out; the same command goes on from the newest checkpoint"
            )
        self._blamed_before |= ranks
        if not self._checkpoints.go_back_before(step):
            raise KieloError(
                f"step {step}: {found}, and no checkpoint was saved before; the same command begins at step 0"
            )
        self.found = found
        return True


def _described(differences: list[Difference]) -> str:
    """Returns e.g. "model/norm.weight on rank 2 (nid1)". All ranks call it."""
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
