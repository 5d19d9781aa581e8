"""Seconds of a pipeline: a simulation of each schedule.

A stage's pass over a micro-batch takes forward, backward for its inputs, and backward for its weights. Only
schedules that split the backward pass run the last two apart. Sources: GPipe (Huang et al. 2019,
arXiv:1811.06965), 1F1B and its interleaving (Narayanan et al. 2021, arXiv:2104.04473), zero bubble and ZB-V
(Qi et al. 2024, arXiv:2401.10241; 2405.15362), DualPipe (DeepSeek-AI 2024, arXiv:2412.19437), of which
DualPipeV is the half that needs no second copy of the weights.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import NamedTuple

from kielo.resolve.stages import SCHEDULES, stages_of_rank

_Task = tuple[str, int, int]  # (kind, stage, micro-batch)
_KINDS = ("forward", "backward", "weights")
# Micro-batches for each rank after which a schedule repeats itself; with 2, uneven stages do not yet.
_SIMULATED_ROUNDS = 4
_LONG = 8  # ranks; longer pipelines, whose simulation takes seconds, get half as many rounds
_SAME_TIME = 1e-12  # seconds; events that are closer than this happen at once


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a micro-batch in each stage, in the model's order, and of a hop to a neighbour's rank."""

    forward: tuple[float, ...]
    backward_inputs: tuple[float, ...]
    backward_weights: tuple[float, ...]
    hop: float = 0.0

    @staticmethod
    def equal(stages: int, forward: float, hop: float = 0.0) -> "StageSeconds":
        """Return equal stages whose three parts take equally long, as matrix products do."""
        return StageSeconds((forward,) * stages, (forward,) * stages, (forward,) * stages, hop)

    def whole(self) -> list[float]:
        return [
            sum(parts)
            for parts in zip(self.forward, self.backward_inputs, self.backward_weights, strict=True)
        ]


@dataclass(frozen=True)
class Span:
    """A task on a timeline. `kind`: "forward", "backward" (whole, or for inputs) or "weights"."""

    rank: int
    stage: int
    micro_batch: int
    kind: str
    start: float
    end: float


def simulated_seconds(schedule: str, stages: StageSeconds, ranks: int, micro_batches: int) -> float:
    """Return seconds from the first forward to the last backward. Long steps repeat a simulated part."""
    chunks = len(stages.forward) // ranks
    unit = _round(ranks, micro_batches) if chunks > 1 and not SCHEDULES[schedule].is_v else ranks
    few = (_SIMULATED_ROUNDS if ranks <= _LONG else _SIMULATED_ROUNDS // 2) * unit
    if micro_batches <= few + unit:
        return max(_ends(_program(schedule, ranks, chunks, micro_batches), schedule, stages, ranks))
    rest = micro_batches % unit
    programs = [_program(schedule, ranks, chunks, few + more) for more in (rest, rest + unit)]
    end = [max(_ends(program, schedule, stages, ranks)) for program in programs]
    return end[0] + (end[1] - end[0]) / unit * (micro_batches - few - rest)


def _round(ranks: int, micro_batches: int) -> int:
    """Return the micro-batches of a round through one chunk: torch makes equal rounds, of `ranks` or more."""
    return micro_batches // max(1, micro_batches // ranks)


def timeline(schedule: str, stages: StageSeconds, ranks: int, micro_batches: int) -> list[Span]:
    """Return every task with its start and end, in order of start, to be drawn.

    Every rank runs a fixed order. The order of a V follows its authors: with tasks of equal length, a rank
    takes a ready task, backward for inputs first, then forward as far as memory allows (as many passes kept
    as 1F1B keeps), then weights.
    """
    program = _program(schedule, ranks, len(stages.forward) // ranks, micro_batches)
    seconds, ends = _durations(schedule, stages), _ends(program, schedule, stages, ranks)
    spans = [
        Span(task.rank, task.stage, task.micro_batch, task.kind, end - seconds[task.what], end)
        for task, end in zip(program, ends, strict=True)
    ]
    return sorted(spans, key=lambda span: span.start)


class _ProgramTask(NamedTuple):
    """A task in a program: index of its seconds, and of the earlier task that it needs (-1: none)."""

    rank: int
    what: int
    need: int
    is_sent: bool
    kind: str
    stage: int
    micro_batch: int


@cache
def _program(schedule: str, ranks: int, chunks: int, micro_batches: int) -> list[_ProgramTask]:
    """Return the tasks of all ranks, each after the task that it needs. The order holds for any seconds."""
    own, stages = [stages_of_rank(schedule, ranks, rank, chunks) for rank in range(ranks)], ranks * chunks
    if SCHEDULES[schedule].is_v:
        orders = _GreedyOrders(StageSeconds.equal(stages, 1.0), own, micro_batches).make()
    else:
        orders = [_order(schedule, ranks, rank, own[rank], micro_batches) for rank in range(ranks)]
    done: dict[tuple[str, int, int], int] = {}
    at, moved = [0] * ranks, True
    program: list[_ProgramTask] = []
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
                program.append(
                    _ProgramTask(rank, what_of[kind] + stage, number, is_sent, kind, stage, micro_batch)
                )
                at[rank] += 1
                moved = True
    if any(at[rank] < len(order) for rank, order in enumerate(orders)):
        raise ValueError(f"a schedule of {ranks} ranks waits for itself")
    return program


def _durations(schedule: str, stages: StageSeconds) -> list[float]:
    backward = stages.backward_inputs
    if not SCHEDULES[schedule].splits_backward:
        backward = tuple(
            inputs + weights for inputs, weights in zip(backward, stages.backward_weights, strict=True)
        )
    return [*stages.forward, *backward, *stages.backward_weights]


def _ends(program: list[_ProgramTask], schedule: str, stages: StageSeconds, ranks: int) -> list[float]:
    seconds, hop = _durations(schedule, stages), stages.hop
    free = [0.0] * ranks
    ends: list[float] = []
    for rank, what, need, is_sent, *_ in program:
        ready = 0.0 if need < 0 else ends[need] + hop if is_sent else ends[need]
        now = free[rank]
        free[rank] = end = (now if now > ready else ready) + seconds[what]
        ends.append(end)
    return ends


def _order(schedule: str, ranks: int, rank: int, own: Sequence[int], micro_batches: int) -> list[_Task]:
    chunks = len(own)
    if schedule == "gpipe":
        forward = [("forward", own[0], m) for m in range(micro_batches)]
        return forward + [("backward", own[0], m) for m in range(micro_batches)]
    # Interleaved: a round of micro-batches through each chunk in turn. 1F1B has one chunk.
    each = _round(ranks, micro_batches) if chunks > 1 else ranks
    rounds = [range(start, min(start + each, micro_batches)) for start in range(0, micro_batches, each)]
    forward = [("forward", own[chunk], m) for some in rounds for chunk in range(chunks) for m in some]
    backward = [
        ("backward", own[chunk], m) for some in rounds for chunk in reversed(range(chunks)) for m in some
    ]
    is_split = SCHEDULES[schedule].splits_backward
    ahead = (ranks - rank - 1) * (1 if chunks == 1 or is_split else 2) + (chunks - 1) * each
    ahead = min(ahead, len(forward))
    # Weights wait for as many backward passes as there are ranks before, which need the gradients of inputs.
    wait = rank if is_split else len(forward)
    order = forward[:ahead]
    for number, task in enumerate(backward):
        order += [*forward[ahead + number : ahead + number + 1], task]
        if number >= wait:
            order.append(("weights", *backward[number - wait][1:]))
    return order + [("weights", *task[1:]) for task in backward[len(backward) - wait :] if is_split]


def _needs(kind: str, stage: int, last: int) -> tuple[str, int] | None:
    """Return (kind, stage) of the same micro-batch that must be done before."""
    if kind == "weights":
        return "backward", stage
    if kind == "forward":
        return ("forward", stage - 1) if stage else None
    return ("forward", last) if stage == last else ("backward", stage + 1)


class _GreedyOrders:
    """The order of each rank of a V: a free rank takes the best ready task."""

    def __init__(self, stages: StageSeconds, own: Sequence[Sequence[int]], micro_batches: int) -> None:
        self.own, self.last, self.hop = own, len(stages.forward) - 1, stages.hop
        self.seconds = dict(
            zip(_KINDS, (stages.forward, stages.backward_inputs, stages.backward_weights), strict=True)
        )
        self.rank_of = {stage: rank for rank, some in enumerate(own) for stage in some}
        self.most_kept = len(own[0]) * len(own)  # passes kept on a rank: 1F1B's memory
        # Tasks that are ready, by rank: (-stage, micro-batch), (micro-batch, stage), and a queue.
        self.forward: list[list[tuple[int, int]]] = [[] for _ in own]
        self.backward: list[list[tuple[int, int]]] = [[] for _ in own]
        self.weights: list[deque[_Task]] = [deque() for _ in own]
        self.kept, self.free_at = [0] * len(own), [0.0] * len(own)
        self.orders: list[list[_Task]] = [[] for _ in own]
        self.count = count()
        # (time, number, rank, task that becomes ready there, or None if the rank becomes free)
        self.events: list[tuple[float, int, int, _Task | None]] = []
        for micro_batch in range(micro_batches):
            self._post(0.0, self.rank_of[0], ("forward", 0, micro_batch))

    def make(self) -> list[list[_Task]]:
        while self.events:
            now = self.events[0][0]
            for rank in self._receive(now):
                if self.free_at[rank] <= now + _SAME_TIME:
                    self._start_next(rank, now)
        return self.orders

    def _post(self, time: float, rank: int, task: _Task | None) -> None:
        heapq.heappush(self.events, (time, next(self.count), rank, task))

    def _receive(self, now: float) -> set[int]:
        ranks = set()
        while self.events and self.events[0][0] <= now + _SAME_TIME:
            _, _, rank, task = heapq.heappop(self.events)
            ranks.add(rank)
            if task is None:
                continue
            kind, stage, micro_batch = task
            if kind == "forward":  # the later stage first: it frees memory sooner
                heapq.heappush(self.forward[rank], (-stage, micro_batch))
            else:
                heapq.heappush(self.backward[rank], (micro_batch, stage))
        return ranks

    def _take(self, rank: int) -> _Task | None:
        forward = self.forward[rank]
        if self.backward[rank]:
            micro_batch, stage = heapq.heappop(self.backward[rank])
            self.weights[rank].append(("weights", stage, micro_batch))
            return "backward", stage, micro_batch
        # The first stage of a rank leaves memory for its later stages, or the pipeline would wait for itself.
        if forward and (-forward[0][0] != self.own[rank][0] or self.kept[rank] < self.most_kept):
            stage, micro_batch = heapq.heappop(forward)
            self.kept[rank] += 1
            return "forward", -stage, micro_batch
        if self.weights[rank]:
            self.kept[rank] -= 1
            return self.weights[rank].popleft()
        return None

    def _start_next(self, rank: int, now: float) -> None:
        task = self._take(rank)
        if task is None:
            return
        kind, stage, micro_batch = task
        self.orders[rank].append(task)
        self.free_at[rank] = end = now + self.seconds[kind][stage]
        self._post(end, rank, None)
        if kind == "forward":
            following = ("backward", stage) if stage == self.last else ("forward", stage + 1)
        elif kind == "backward" and stage > 0:
            following = ("backward", stage - 1)
        else:
            return
        to = self.rank_of[following[1]]
        self._post(end + self.hop * (to != rank), to, (*following, micro_batch))
