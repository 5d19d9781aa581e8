"""How a job scales over numbers of nodes; no torch."""

from collections.abc import Sequence

from kielo.plan.planned import Job, Planned
from kielo.plan.search import Found, search


def strong_and_weak(job: Job, nodes: Sequence[int], found: Found) -> tuple[list[Planned], list[Planned]]:
    """The fastest layout on each number of nodes: with the job's own batch, and with one that grows with the
    nodes.

    `found` is of a search over `nodes`. Numbers on which nothing runs are left out.
    """
    strong = [found.ranked[number][0] for number in nodes if found.ranked[number]]
    first = strong[0].nodes
    weak = []
    for planned in strong:
        train = job.recipe.train.model_copy(
            update={"tokens_per_step": job.recipe.train.tokens_per_step * planned.nodes // first}
        )
        grown = Job.of(job.recipe.model_copy(update={"train": train}), job.model)
        weak += search(grown, [planned.nodes]).ranked[planned.nodes][:1]
    return strong, weak
