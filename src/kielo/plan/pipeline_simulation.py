"""When a pipeline is done: closed forms for all schedules, and a simulation of each that they are checked
against.

A stage's pass over a micro-batch takes forward, backward for its inputs, and backward for its weights; only
the schedules that split the backward pass do the last two apart. Sources: GPipe (Huang et al. 2019,
arXiv:1811.06965), 1F1B and its interleaving (Narayanan et al. 2021, arXiv:2104.04473), zero bubble and ZB-V
(Qi et al. 2024, arXiv:2401.10241; 2405.15362), DualPipe (DeepSeek-AI 2024, arXiv:2412.19437), of which
DualPipeV is the half that needs no second copy of the weights.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from kielo.resolve.stages import SCHEDULES, stages_of_rank

Column = np.ndarray
_WAITS_OF_SPLIT = {True: 1.4, False: 0.0}  # is it a V → hops a micro-batch and doubling of the ranks
_LONG = 8  # ranks; longer pipelines, whose simulation takes seconds, get half as many
_KINDS = ("forward", "backward", "weights")
# micro-batches for each rank, beyond which a schedule repeats itself (with 2, uneven stages do not yet)
_SIMULATED_ROUNDS = 4


@dataclass(frozen=True)
class StageSeconds:
    """Of each stage, in the model's order: seconds of a micro-batch. `hop` is from a stage to a neighbour's
    rank.
    """

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
    """One piece of work of a timeline: `kind` is "forward", "backward" (whole, or for inputs) or
    "weights".
    """

    rank: int
    stage: int
    micro_batch: int
    kind: str
    start: float
    end: float


def closed_form_seconds(schedule: str, stages: StageSeconds, ranks: int, micro_batches: int) -> float:
    """From the first forward to the last backward: t ≈ a (m - 1) + what fills and empties the pipeline.

    a is the work of the heaviest rank. 1F1B: Σ of all stages for the first micro-batch; interleaving divides
    what lies over a rank's own work by its stages; a split backward pass fills the rest with work on weights,
    up to the way of the first micro-batch forward to the rank that starts last.
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
        # The first is back at the first rank when the last has long left it: all of them follow each other
        # once round.
        return total + (micro_batches - 1) * max(whole) + 2 * stages.hop * (len(whole) - 1)
    if SCHEDULES[schedule].splits_backward:
        fill = _fill_of_split(schedule, stages, ranks)
        # Read off the simulation: with pieces this short, a rank waits for a neighbour more often the more
        # there are.
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
    """What a split backward pass cannot fill: the way forward to the last rank, and for one direction of
    stages also the way back less the weights' work that waits.
    """
    first_pass = sum(stages.forward[: ranks - 1])
    if SCHEDULES[schedule].is_v:
        return first_pass
    return first_pass + max(
        0.0, sum(stages.backward_inputs[: ranks - 1]) - sum(stages.backward_weights[: ranks - 1])
    )


def simulated_seconds(schedule: str, stages: StageSeconds, ranks: int, micro_batches: int) -> float:
    """The same by simulation; long steps by their repeating part."""
    chunks = len(stages.forward) // ranks
    unit = _round(ranks, micro_batches) if chunks > 1 and not SCHEDULES[schedule].is_v else ranks
    few = (_SIMULATED_ROUNDS if ranks <= _LONG else _SIMULATED_ROUNDS // 2) * unit
    if micro_batches <= few + unit:
        return max(_ends(_program(schedule, ranks, chunks, micro_batches), schedule, stages, ranks))
    rest = micro_batches % unit
    end = [
        max(_ends(_program(schedule, ranks, chunks, few + more), schedule, stages, ranks))
        for more in (rest, rest + unit)
    ]
    return end[0] + (end[1] - end[0]) / unit * (micro_batches - few - rest)


def _round(ranks: int, micro_batches: int) -> int:
    """Micro-batches that an interleaved schedule takes through one chunk before the next, as torch does:
    equal rounds of at least as many as there are ranks, or all of them in one.
    """
    return micro_batches // max(1, micro_batches // ranks)


def timeline(schedule: str, stages: StageSeconds, ranks: int, micro_batches: int) -> list[Span]:
    """Every piece of work with its start and end, in order of start: for a picture.

    Every rank runs a fixed order. That of a V is made as its authors say: with all pieces of the same length,
    a rank takes what is ready, backward for inputs first, then forward as far as memory allows (as many
    passes kept as 1F1B keeps), and weights when nothing else is.
    """
    program = _program(schedule, ranks, len(stages.forward) // ranks, micro_batches)
    seconds, ends = _durations(schedule, stages), _ends(program, schedule, stages, ranks)
    spans = [
        Span(piece.rank, piece.stage, piece.micro_batch, piece.kind, end - seconds[piece.what], end)
        for piece, end in zip(program, ends)
    ]
    return sorted(spans, key=lambda span: span.start)


class _Piece(NamedTuple):
    """Work in a program: `what` numbers its seconds, `need` the piece before it that it waits for (-1: none),
    which is another rank's where `is_sent`.
    """

    rank: int
    what: int
    need: int
    is_sent: bool
    kind: str
    stage: int
    micro_batch: int


@cache
def _program(schedule: str, ranks: int, chunks: int, micro_batches: int) -> list[_Piece]:
    """What all ranks do, in an order in which nothing comes before what it needs; it holds for
    any seconds.
    """
    own, stages = [stages_of_rank(schedule, ranks, rank, chunks) for rank in range(ranks)], ranks * chunks
    if SCHEDULES[schedule].is_v:
        orders = _greedy(StageSeconds.equal(stages, 1.0), own, micro_batches)
    else:
        orders = [_order(schedule, ranks, rank, own[rank], micro_batches) for rank in range(ranks)]
    done: dict[tuple[str, int, int], int] = {}
    at, program, moved = [0] * ranks, [], True
    what_of = {kind: number * stages for number, kind in enumerate(_KINDS)}
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                kind, stage, micro_batch = order[at[rank]]
                need = _needs(kind, stage, stages - 1)
                number = done.get((*need, micro_batch)) if need else -1
                if number is None:
                    break
                is_sent = number >= 0 and program[number].rank != rank
                done[kind, stage, micro_batch] = len(program)
                program.append(_Piece(rank, what_of[kind] + stage, number, is_sent, kind, stage, micro_batch))
                at[rank] += 1
                moved = True
    if any(at[rank] < len(order) for rank, order in enumerate(orders)):
        raise ValueError(f"a schedule of {ranks} ranks waits for itself")
    return program


def _durations(schedule: str, stages: StageSeconds) -> list[float]:
    """Seconds by `_Piece.what`."""
    backward = stages.backward_inputs
    if not SCHEDULES[schedule].splits_backward:
        backward = tuple(inputs + weights for inputs, weights in zip(backward, stages.backward_weights))
    return [*stages.forward, *backward, *stages.backward_weights]


def _ends(program: list[_Piece], schedule: str, stages: StageSeconds, ranks: int) -> list[float]:
    """When each piece is done."""
    seconds, hop = _durations(schedule, stages), stages.hop
    free, ends = [0.0] * ranks, []
    for rank, what, need, is_sent, *_ in program:
        ready = 0.0 if need < 0 else ends[need] + hop if is_sent else ends[need]
        now = free[rank]
        free[rank] = end = (now if now > ready else ready) + seconds[what]
        ends.append(end)
    return ends


def _order(
    schedule: str, ranks: int, rank: int, own: Sequence[int], micro_batches: int
) -> list[tuple[str, int, int]]:
    """(kind, stage, micro-batch) of a rank, one after another."""
    chunks = len(own)
    if schedule == "gpipe":
        forward = [("forward", own[0], m) for m in range(micro_batches)]
        return forward + [("backward", own[0], m) for m in range(micro_batches)]
    # Interleaved: a round of micro-batches through one chunk, then through the next; 1F1B is the case of one
    # chunk.
    each = _round(ranks, micro_batches) if chunks > 1 else ranks
    rounds = [range(start, min(start + each, micro_batches)) for start in range(0, micro_batches, each)]
    forward = [("forward", own[chunk], m) for some in rounds for chunk in range(chunks) for m in some]
    backward = [
        ("backward", own[chunk], m) for some in rounds for chunk in reversed(range(chunks)) for m in some
    ]
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


def _greedy(
    stages: StageSeconds, own: Sequence[Sequence[int]], micro_batches: int
) -> list[list[tuple[str, int, int]]]:
    """(kind, stage, micro-batch) of each rank in order: when free, it takes the best piece that is ready."""
    last, ranks = len(stages.forward) - 1, len(own)
    kept_at_most = len(own[0]) * ranks  # passes kept on a rank: 1F1B's memory
    rank_of = {stage: rank for rank, some in enumerate(own) for stage in some}
    ready: list[list[tuple[int, int, int]]] = [[] for _ in own]  # backward, by age
    forward: list[list[tuple[int, int, int]]] = [[] for _ in own]
    weights: list[list[tuple[int, int]]] = [[] for _ in own]
    kept, free_at = [0] * ranks, [0.0] * ranks
    orders: list[list[tuple[str, int, int]]] = [[] for _ in own]
    # (time, sequence, rank, kind, stage, micro-batch)
    events: list[tuple[float, int, int, str, int, int]] = []
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
                # the later stage frees memory sooner
                heapq.heappush(forward[rank], (-stage, micro_batch, stage))
            elif kind == "backward":
                heapq.heappush(ready[rank], (micro_batch, stage, stage))
        for rank in touched:
            if free_at[rank] > now + 1e-12:
                continue
            # The first stage of a rank leaves room for its later ones, or the pipeline would wait for itself.
            can_forward = bool(forward[rank]) and (
                forward[rank][0][2] != own[rank][0] or kept[rank] < kept_at_most
            )
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
            orders[rank].append((kind, stage, micro_batch))
            post(end, rank, "free", stage, micro_batch)
            if kind == "forward":
                following = ("backward", stage) if stage == last else ("forward", stage + 1)
            elif kind == "backward" and stage > 0:
                following = ("backward", stage - 1)
            else:
                continue
            to = rank_of[following[1]]
            post(end + stages.hop * (to != rank), to, following[0], following[1], micro_batch)
    return orders
