"""Executor of datatrove steps on processes of this machine (`worker_processes.py`).

Steps and a number of workers -> what each step counted, summed over the workers.
"""

from collections import Counter, deque
from collections.abc import Sequence
from functools import partial

from kielo.corpus.step import CorpusStep
from kielo.corpus.worker_processes import results_in_order


def run_pipeline(steps: Sequence[CorpusStep], workers: int) -> list[dict[str, int]]:
    """Run the steps over all ranks, one a worker; returns for each step its counts by label.

    With one worker everything happens in this process. The first exception of a worker ends the others and is
    raised here. Raises KieloError for a worker that was killed or ran out of memory.
    """
    totals: list[Counter[str]] = [Counter() for _ in steps]
    make = partial(partial, _run_rank, steps, workers)
    for counts_of_steps in results_in_order(make, range(workers), workers, "corpus"):
        for total, counts in zip(totals, counts_of_steps, strict=True):
            total.update(counts)
    return [dict(total) for total in totals]


def _run_rank(steps: Sequence[CorpusStep], world_size: int, rank: int) -> list[dict[str, int]]:
    """Run the steps on one rank's share, each step fed by the one before; returns their counts."""
    documents = None
    for step in steps:
        documents = step(documents, rank, world_size)
    deque(documents, maxlen=0)
    return [{label: int(metric.total) for label, metric in step.stats.stats.items()} for step in steps]
