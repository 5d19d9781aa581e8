"""When a pipeline is done: closed forms for all schedules, and a simulation of each that they are checked against.

A stage's pass over a micro-batch takes forward, backward for its inputs, and backward for its weights; only the schedules
that split the backward pass do the last two apart. Sources: GPipe (Huang et al. 2019, arXiv:1811.06965), 1F1B and its
interleaving (Narayanan et al. 2021, arXiv:2104.04473), zero bubble and ZB-V (Qi et al. 2024, arXiv:2401.10241; 2405.15362),
DualPipe (DeepSeek-AI 2024, arXiv:2412.19437), of which DualPipeV is the half that needs no second copy of the weights.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from kielo.plan.stages import SCHEDULES, stages_of_rank

Column = np.ndarray
_WAITS_OF_SPLIT = {True: 1.4, False: 0.0}  # is it a V → hops a micro-batch and doubling of the ranks
_SIMULATED_ROUNDS = 4  # micro-batches for each rank, beyond which a schedule repeats itself (with 2, uneven stages do not yet)


@dataclass(frozen=True)
class StageSeconds:
    """Of each stage, in the model's order: seconds of a micro-batch. `hop` is from a stage to a neighbour's rank."""

    forward: tuple[float, ...]
    backward_inputs: tuple[float, ...]
    backward_weights: tuple[float, ...]
    hop: float = 0.0

    @staticmethod
    def equal(stages: int, forward: float, hop: float = 0.0) -> "StageSeconds":
        """As matrices have it: each of the three parts takes as long as the others."""
        return StageSeconds((forward,) * stages, (forward,) * stages, (forward,) * stages, hop)

    def whole(self) -> list[float]:
        return [sum(parts) for parts in zip(self.forward, self.backward_inputs, self.backward_weights)]


@dataclass(frozen=True)
class Span:
    """One piece of work of a timeline: `kind` is "forward", "backward" (whole, or for inputs) or "weights"."""

    rank: int
    stage: int
    micro_batch: int
    kind: str
    start: float
    end: float


def closed_form_seconds(schedule: str, stages: StageSeconds, ranks: int, micro_batches: int) -> float:
    """From the first forward to the last backward: t ≈ a (m - 1) + what fills and empties the pipeline.

    a is the work of the heaviest rank. 1F1B: Σ of all stages for the first micro-batch; interleaving divides what lies
    over a rank's own work by its stages; a split backward pass fills the rest with work on weights, up to the way of the
    first micro-batch forward to the rank that starts last.
    """
    whole, chunks = stages.whole(), len(stages.forward) // ranks
    if schedule == "gpipe":
        backward = [b + w for b, w in zip(stages.backward_inputs, stages.backward_weights)]
        steady = (micro_batches - 1) * (max(stages.forward) + max(backward))
        return sum(stages.forward) + sum(backward) + steady + 2 * stages.hop * (ranks - 1)
    of_rank = [sum(whole[stage] for stage in stages_of_rank(schedule, ranks, rank, chunks)) for rank in range(ranks)]
    heaviest, total = max(of_rank), sum(of_rank)
    if schedule == "interleaved_1f1b" and micro_batches < ranks:
        # The first is back at the first rank when the last has long left it: all of them follow each other once round.
        return total + (micro_batches - 1) * max(whole) + 2 * stages.hop * (len(whole) - 1)
    if SCHEDULES[schedule].splits_backward:
        fill = _fill_of_split(schedule, stages, ranks)
        # Read off the simulation: with pieces this short, a rank waits for a neighbour more often the more there are.
        waits = _WAITS_OF_SPLIT[SCHEDULES[schedule].is_v] * math.log2(ranks) * micro_batches
        return micro_batches * heaviest + fill + stages.hop * (2 * (ranks - 1) + waits)
    hops = 2 * stages.hop * (ranks - 1) * (1 + (micro_batches - 1) / ranks * (chunks == 1))
    if chunks > 1:
        hops = 2 * stages.hop * (ranks - 1 + (ranks * chunks - ranks) / ranks)
    return micro_batches * heaviest + (total - heaviest) / chunks + hops


def _fill_of_split(schedule: str, stages: StageSeconds, ranks: int) -> float:
    """What a split backward pass cannot fill: the way forward to the last rank, and for one direction of stages also the
    way back less the weights' work that waits.
    """
    first_pass = sum(stages.forward[: ranks - 1])
    if SCHEDULES[schedule].is_v:
        return first_pass
    return first_pass + max(0.0, sum(stages.backward_inputs[: ranks - 1]) - sum(stages.backward_weights[: ranks - 1]))


def simulated_seconds(schedule: str, stages: StageSeconds, ranks: int, micro_batches: int) -> float:
    """The same by simulation; long steps by their repeating part."""
    unit = _round(ranks, micro_batches) if len(stages.forward) > ranks and not SCHEDULES[schedule].is_v else ranks
    few = _SIMULATED_ROUNDS * unit
    if micro_batches <= few + unit:
        return max(span.end for span in timeline(schedule, stages, ranks, micro_batches))
    rest = micro_batches % unit
    end = [max(span.end for span in timeline(schedule, stages, ranks, few + more)) for more in (rest, rest + unit)]
    return end[0] + (end[1] - end[0]) / unit * (micro_batches - few - rest)


def _round(ranks: int, micro_batches: int) -> int:
    """Micro-batches that an interleaved schedule takes through one chunk before the next, as torch does: equal rounds of at
    least as many as there are ranks, or all of them in one.
    """
    return micro_batches // max(1, micro_batches // ranks)


def timeline(schedule: str, stages: StageSeconds, ranks: int, micro_batches: int) -> list[Span]:
    """Every piece of work with its start and end, in order of start: for a picture, and for `simulated_seconds`.

    Every rank runs a fixed order. That of a V is made as its authors say: with all pieces of the same length, a rank takes
    what is ready, backward for inputs first, then forward as far as memory allows (as many passes kept as 1F1B keeps),
    and weights when nothing else is.
    """
    chunks = len(stages.forward) // ranks
    own = [stages_of_rank(schedule, ranks, rank, chunks) for rank in range(ranks)]
    if SCHEDULES[schedule].is_v:
        orders = _orders_of_v(tuple(own), micro_batches)
    else:
        orders = [_order(schedule, ranks, rank, own[rank], micro_batches) for rank in range(ranks)]
    spans = _in_order(stages, orders, SCHEDULES[schedule].splits_backward)
    return sorted(spans, key=lambda span: span.start)


@cache
def _orders_of_v(own: tuple[tuple[int, ...], ...], micro_batches: int) -> list[list[tuple[str, int, int]]]:
    orders: list[list[tuple[str, int, int]]] = [[] for _ in own]
    for span in _greedy(StageSeconds.equal(sum(map(len, own)), 1.0), list(own), micro_batches):
        orders[span.rank].append((span.kind, span.stage, span.micro_batch))
    return orders


def _order(schedule: str, ranks: int, rank: int, own: Sequence[int], micro_batches: int) -> list[tuple[str, int, int]]:
    """(kind, stage, micro-batch) of a rank, one after another."""
    chunks = len(own)
    if schedule == "gpipe":
        forward = [("forward", own[0], m) for m in range(micro_batches)]
        return forward + [("backward", own[0], m) for m in range(micro_batches)]
    # Interleaved: a round of micro-batches through one chunk, then through the next; 1F1B is the case of one chunk.
    each = _round(ranks, micro_batches) if chunks > 1 else ranks
    rounds = [range(start, min(start + each, micro_batches)) for start in range(0, micro_batches, each)]
    forward = [("forward", own[chunk], m) for some in rounds for chunk in range(chunks) for m in some]
    backward = [("backward", own[chunk], m) for some in rounds for chunk in reversed(range(chunks)) for m in some]
    is_split = SCHEDULES[schedule].splits_backward
    ahead = (ranks - rank - 1) * (1 if chunks == 1 or is_split else 2) + (chunks - 1) * each
    ahead = min(ahead, len(forward))
    # Weights wait for as many backward passes as ranks come before, which need the gradients of inputs.
    wait = rank if is_split else len(forward)
    order = forward[:ahead]
    for number, piece in enumerate(backward):
        order += [*forward[ahead + number : ahead + number + 1], piece]
        if number >= wait:
            order.append(("weights", *backward[number - wait][1:]))
    return order + [("weights", *piece[1:]) for piece in backward[len(backward) - wait :] if is_split]


def _needs(kind: str, stage: int, last: int) -> tuple[str, int] | None:
    """(kind, stage) of the same micro-batch that must be there."""
    if kind == "weights":
        return "backward", stage
    if kind == "forward":
        return ("forward", stage - 1) if stage else None
    return ("forward", last) if stage == last else ("backward", stage + 1)


def _in_order(stages: StageSeconds, orders: list[list[tuple[str, int, int]]], is_split: bool) -> list[Span]:
    last = len(stages.forward) - 1
    whole = [b + w for b, w in zip(stages.backward_inputs, stages.backward_weights)]
    seconds = {
        "forward": stages.forward,
        "backward": stages.backward_inputs if is_split else whole,
        "weights": stages.backward_weights,
    }
    done: dict[tuple[str, int, int], tuple[float, int]] = {}  # piece → (end, rank)
    clocks, at, spans = [0.0] * len(orders), [0] * len(orders), []
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                kind, stage, micro_batch = order[at[rank]]
                need = _needs(kind, stage, last)
                ready = 0.0
                if need is not None:
                    if (*need, micro_batch) not in done:
                        break
                    end, where = done[(*need, micro_batch)]
                    ready = end + stages.hop * (where != rank)
                start = max(clocks[rank], ready)
                clocks[rank] = start + seconds[kind][stage]
                done[(kind, stage, micro_batch)] = clocks[rank], rank
                spans.append(Span(rank, stage, micro_batch, kind, start, clocks[rank]))
                at[rank] += 1
                moved = True
    if any(at[rank] < len(order) for rank, order in enumerate(orders)):
        raise ValueError(f"a schedule of {len(orders)} ranks waits for itself")
    return spans


def _greedy(stages: StageSeconds, own: list[Sequence[int]], micro_batches: int) -> list[Span]:
    """Each rank, when free, takes the best piece that is ready."""
    last, ranks = len(stages.forward) - 1, len(own)
    kept_at_most = len(own[0]) * ranks  # passes kept on a rank: 1F1B's memory
    rank_of = {stage: rank for rank, some in enumerate(own) for stage in some}
    ready: list[list[tuple[int, int, int]]] = [[] for _ in own]  # backward, by age
    forward: list[list[tuple[int, int, int]]] = [[] for _ in own]
    weights: list[list[tuple[int, int]]] = [[] for _ in own]
    kept, free_at, spans = [0] * ranks, [0.0] * ranks, []
    events: list[tuple[float, int, int, str, int, int]] = []  # (time, sequence, rank, kind, stage, micro-batch)
    count = 0

    def post(time: float, rank: int, kind: str, stage: int, micro_batch: int) -> None:
        nonlocal count
        heapq.heappush(events, (time, count, rank, kind, stage, micro_batch))
        count += 1

    for micro_batch in range(micro_batches):
        post(0.0, rank_of[0], "forward", 0, micro_batch)
    while events:
        now = events[0][0]
        touched = set()
        while events and events[0][0] <= now + 1e-12:
            _, _, rank, kind, stage, micro_batch = heapq.heappop(events)
            touched.add(rank)
            if kind == "forward":
                heapq.heappush(forward[rank], (-stage, micro_batch, stage))  # the later stage frees memory sooner
            elif kind == "backward":
                heapq.heappush(ready[rank], (micro_batch, stage, stage))
        for rank in touched:
            if free_at[rank] > now + 1e-12:
                continue
            # The first stage of a rank leaves room for its later ones, or the pipeline would wait for itself.
            can_forward = bool(forward[rank]) and (forward[rank][0][2] != own[rank][0] or kept[rank] < kept_at_most)
            if ready[rank]:
                _, _, stage = (piece := heapq.heappop(ready[rank]))
                kind, micro_batch, seconds = "backward", piece[0], stages.backward_inputs[stage]
                weights[rank].append((stage, micro_batch))
            elif can_forward:
                _, micro_batch, stage = heapq.heappop(forward[rank])
                kind, seconds = "forward", stages.forward[stage]
                kept[rank] += 1
            elif weights[rank]:
                stage, micro_batch = weights[rank].pop(0)
                kind, seconds = "weights", stages.backward_weights[stage]
                kept[rank] -= 1
            else:
                continue
            end = now + seconds
            free_at[rank] = end
            spans.append(Span(rank, stage, micro_batch, kind, now, end))
            post(end, rank, "free", stage, micro_batch)
            if kind == "forward":
                following = ("backward", stage) if stage == last else ("forward", stage + 1)
            elif kind == "backward" and stage > 0:
                following = ("backward", stage - 1)
            else:
                continue
            to = rank_of[following[1]]
            post(end + stages.hop * (to != rank), to, following[0], following[1], micro_batch)
    return spans
