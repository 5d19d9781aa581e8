"""Closed forms of a pipeline's seconds, for all schedules: what kielo.plan's simulation is held against.

Sources: see `kielo/plan/pipeline_simulation.py`.
"""

import math

from kielo.plan.pipeline_simulation import StageSeconds
from kielo.resolve.stages import SCHEDULES, stages_of_rank

# True for a V → hops for each micro-batch and doubling of the ranks
_WAITS_OF_SPLIT = {True: 1.4, False: 0.0}


def closed_form_seconds(schedule: str, stages: StageSeconds, ranks: int, micro_batches: int) -> float:
    """Computes seconds from the first forward to the last backward: t ≈ a (m - 1) + filling and emptying.

    a is the work of the heaviest rank. 1F1B: Σ of all stages for the first micro-batch. Interleaving divides
    the wait beyond a rank's own work by its stages. A split backward pass fills that wait with work on
    weights, except for the first micro-batch's way forward to the rank that starts last.
    """
    whole, chunks = stages.whole(), len(stages.forward) // ranks
    if schedule == "gpipe":
        backward = [b + w for b, w in zip(stages.backward_inputs, stages.backward_weights)]
        steady = (micro_batches - 1) * (max(stages.forward) + max(backward))
        return sum(stages.forward) + sum(backward) + steady + 2 * stages.hop * (ranks - 1)
    of_rank = [
        sum(whole[stage] for stage in stages_of_rank(schedule, ranks, rank, chunks)) for rank in range(ranks)
    ]
    heaviest, total = max(of_rank), sum(of_rank)
    if schedule == "interleaved_1f1b" and micro_batches < ranks:
        # The first micro-batch is back at the first rank long after the last has left it, so none waits for
        # another there.
        return total + (micro_batches - 1) * max(whole) + 2 * stages.hop * (len(whole) - 1)
    if SCHEDULES[schedule].splits_backward:
        fill = _fill_of_split(schedule, stages, ranks)
        # Found by simulation: tasks are so short that a rank waits for its neighbours more often the more
        # ranks there are.
        waits = _WAITS_OF_SPLIT[SCHEDULES[schedule].is_v] * math.log2(ranks) * micro_batches
        return micro_batches * heaviest + fill + stages.hop * (2 * (ranks - 1) + waits)
    hops = 2 * stages.hop * (ranks - 1) * (1 + (micro_batches - 1) / ranks * (chunks == 1))
    if chunks > 1:
        # A rank idles while the first chunk's stages before it have their first forward and last backward
        # pass, and while the last chunk's stages after it have their first of both.
        idle = [sum(whole[:rank]) + sum(whole[ranks * (chunks - 1) + rank + 1 :]) for rank in range(ranks)]
        hops = 2 * stages.hop * (ranks - 1 + (ranks * chunks - ranks) / ranks)
        return max(micro_batches * work + wait for work, wait in zip(of_rank, idle)) + hops
    return micro_batches * heaviest + total - heaviest + hops


def _fill_of_split(schedule: str, stages: StageSeconds, ranks: int) -> float:
    """Computes the wait that a split backward pass cannot fill.

    It is the way forward to the last rank and, where stages run in one direction, also the way back less the
    work on weights that waits.
    """
    first_pass = sum(stages.forward[: ranks - 1])
    if SCHEDULES[schedule].is_v:
        return first_pass
    return first_pass + max(
        0.0, sum(stages.backward_inputs[: ranks - 1]) - sum(stages.backward_weights[: ranks - 1])
    )
