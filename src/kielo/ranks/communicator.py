"""Communicators: started one at a time with the missing ranks named, and limits of time for their work.

Process groups that are first used in the middle of a step can hang without a message (on LUMI in 13 of 17
starts: laifs-container-recipes#44). So each is made and warmed in a thread within a time limit. Each rank
sets a mark in the store when it arrives, and missing marks name the missing ranks.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout  # the same in torch 2.10, 2.11 and 2.13

from kielo.ranks.hang_watch import STEPS, Progress, some
from kielo.ranks.rendezvous import hosts_of_ranks, nodes_of_ranks
from kielo.recipe.errors import KieloError, no_more_processes
from kielo.resolve.software import as_tried

_ANSWER_SECONDS = 3.0  # rank 0, which serves the store, stays as long (world.LINGER_SECONDS)
_FIRST_STEPS = 2  # the third step is compiled and warm
_MOST_NAMED = 32
_BATCH_ALL = ("2.10", "2.11")  # versions of torch whose pipelines send no message alone (`_batch_p2p`)


class NoCommunicator(KieloError):
    """A communicator that did not start. On rank 0 `hosts` has the missing ranks' hosts, if known."""

    def __init__(self, message: str, hosts: Sequence[str] = ()):
        super().__init__(message)
        self.hosts = tuple(hosts)


@dataclass(frozen=True)
class Startup:
    rank: int
    store: dist.Store
    device: torch.device
    timeout_seconds: float

    @property
    def group_timeout(self) -> timedelta:
        """The limit of a new group, longer than the limit of its start, which names the missing ranks."""
        return timedelta(seconds=self.timeout_seconds, minutes=30)


def raise_communicator(
    startup: Startup, name: str, ranks: Sequence[int], make: Callable[[], dist.ProcessGroup | None]
) -> dist.ProcessGroup:
    """Call `make`, sum a one over the new group, and return the group.

    name: the mesh axis (or "world"). ranks: the global ranks of the group. Raises NoCommunicator, on every
    rank that arrived, naming the axis and the missing ranks.
    """
    made: list[dist.ProcessGroup] = []

    def start() -> None:
        if (group := make()) is None:  # only by torch's types
            raise KieloError(f"torch has made no group {name!r}")
        made.append(group)
        count = torch.ones((), device=startup.device)
        dist.all_reduce(count, group=group)
        # .item() also waits for the device: an NCCL group connects here, not in `make`
        if count.item() != len(ranks):
            raise RuntimeError(f"its first all-reduce counted {count.item():g} ranks instead of {len(ranks)}")

    _within_limit(startup, name, ranks, start)
    return made[0]


def pass_message(
    operation: Callable[..., Any], tensor: torch.Tensor, group: dist.ProcessGroup, other: int
) -> None:
    """Do `dist.isend` to, or `dist.irecv` from, rank `other` of the group, and wait.

    A batch uses the group's own communicator. `dist.send` would make another communicator of the two ranks
    (`ProcessGroupNCCL::pointToPoint` without a bound device, torch 2.10 to 2.13).
    """
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, group=group, group_peer=other)]):
        work.wait()


def warm_messages(startup: Startup, name: str, ranks: Sequence[int], group: dist.ProcessGroup) -> None:
    """Send a message each way between neighbours, and between the first and last rank, as a pipeline does.

    Schedules of torch before 2.13 batch all their messages over the group's own communicator. Later
    schedules send most messages alone, so these need a communicator of each two ranks too. ranks: the global
    ranks of the group. Raises KieloError naming a rank that did not arrive within each pair's time limit.
    """
    sends_alone = as_tried(torch.__version__) not in _BATCH_ALL
    size, mine = len(ranks), list(ranks).index(startup.rank)
    pairs = [(first, first + 1) for start in (0, 1) for first in range(start, size - 1, 2)]
    if size > 2:
        pairs.append((0, size - 1))
    for pair in pairs:  # all ranks of the group take their pairs in this order
        if mine not in pair:
            continue
        low, high = pair

        def exchange(low: int = low, high: int = high) -> None:
            message = torch.ones((), device=startup.device)
            for source, target in ((low, high), (high, low)):
                if mine == source:
                    pass_message(dist.isend, message, group, target)
                else:
                    pass_message(dist.irecv, message, group, source)
                if sends_alone and mine == source:
                    dist.send(message, group=group, group_dst=target)
                elif sends_alone:
                    dist.recv(message, group=group, group_src=source)
            message.item()  # waits for the device

        _within_limit(startup, f"{name} {low}-{high}", [ranks[low], ranks[high]], exchange)


def own_connection(store: dist.Store) -> dist.Store:
    """Return another connection to the store, because a store serves one thread at a time."""
    return store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it


def _within_limit(startup: Startup, name: str, ranks: Sequence[int], start: Callable[[], None]) -> None:
    marks = own_connection(startup.store)  # `start` may wait in the other connection

    def work() -> None:
        if startup.device.type == "cuda":
            torch.cuda.set_device(startup.device)  # the current device belongs to the thread
        start()

    marks.set(f"arrived/{name}/{startup.rank}", "1")
    reason, cause = f"was not up after {startup.timeout_seconds:g} s", None
    try:
        if in_thread(work, f"communicator {name}", startup.timeout_seconds):
            return
    except Exception as error:
        if said := no_more_processes(error):
            raise KieloError(f"rank {startup.rank}: communicator {name!r} failed: {said}") from error
        reason, cause = f"failed ({error})", error
    message = f"rank {startup.rank}: communicator {name!r} {reason}: {who_is_missing(name, ranks, marks)}"
    hosts: list[str] = []
    if startup.rank == 0:
        with suppress(RuntimeError):  # the store may be gone
            hosts = hosts_of_ranks(_missing(name, ranks, marks))
    raise NoCommunicator(message, hosts) from cause


def in_thread(call: Callable[[], None], name: str, timeout_seconds: float | None = None) -> bool:
    """Call in another thread and wait. Return False at the time limit. Raise what `call` raises.

    While it waits, this thread can take signals, unlike in a call of torch that waits for others.
    """
    errors: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        try:
            call()
        except BaseException as error:  # noqa: B036 - handed to the waiting thread, which raises it
            errors.append(error)
        ended.set()

    threading.Thread(target=work, name=name, daemon=True).start()
    is_ended = ended.wait(timeout_seconds)
    if errors:
        raise errors[0]
    return is_ended


def who_is_missing(name: str, ranks: Sequence[int], store: dist.Store) -> str:
    """Return text about the ranks without a mark in `store`, written by the first rank that asks."""
    text = f"missing/{name}/{ranks[0]}"
    try:
        if store.add(f"{text}/asked", 1) == 1:
            store.set(text, _about(_missing(name, ranks, store), len(ranks)))
        store.wait([text], timedelta(seconds=_ANSWER_SECONDS))
        return store.get(text).decode()
    except RuntimeError:  # the base of dist.DistError
        return "the store on rank 0 is gone, so rank 0 ended first. Its message gives the reason"


def _missing(name: str, ranks: Sequence[int], store: dist.Store) -> list[int]:
    """Return the ranks without a mark, by one question, and two for each half that lacks some."""
    if store.check([f"arrived/{name}/{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    middle = len(ranks) // 2
    return _missing(name, ranks[:middle], store) + _missing(name, ranks[middle:], store)


def _about(missing: list[int], size: int) -> str:
    if not missing:
        return (
            f"all {size} ranks arrived, but could not communicate. Fix: check the network interface "
            "(NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME) and train.start_timeout_seconds"
        )
    shown = some(missing, _MOST_NAMED)
    plural = "ranks" if len(missing) > 1 else "rank"
    nodes = nodes_of_ranks(missing)
    where = f" (they are on {some(nodes, _MOST_NAMED)})" if nodes else ""
    return (
        f"{plural} {shown} did not arrive, {size - len(missing)} of {size} did{where}. Fix: look at the log "
        f"of {plural} {shown}, or raise train.start_timeout_seconds if they are merely slow"
    )


class TimeLimits:
    """The time limits of collectives of `groups`: long while a range's first steps compile, later short.

    Messages of a pipeline over gloo keep the limit of `Startup.group_timeout`. `progress` records what this
    rank does.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        long_seconds: float,
        short_seconds: float,
        progress: Progress | None = None,
    ):
        self._groups, self._long, self._short = groups, long_seconds, short_seconds
        self.progress = progress or Progress(short_seconds, short_seconds, long_seconds, short_seconds)
        self.restart()

    def restart(self) -> None:
        self._steps = 0
        self._set(self._long)
        self.progress.begin("the build and the first steps")

    def step_done(self, step: int) -> None:
        self._steps += 1
        self.progress.step_done(step)
        if self._steps == _FIRST_STEPS:
            self._set(self._short)
            self.progress.begin(STEPS)

    @contextmanager
    def paused(self, doing: str) -> Iterator[None]:
        """Set the long limit for work between steps: held-out text, which compiles too, and saves."""
        self._set(self._long)
        with self.progress.during(doing):
            yield
        self._set(self._long if self._steps < _FIRST_STEPS else self._short)

    def _set(self, seconds: float) -> None:
        for group in self._groups:
            _set_pg_timeout(timedelta(seconds=seconds), group)
