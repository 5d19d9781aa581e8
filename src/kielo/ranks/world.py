"""The world of ranks, started by one code path for all launchers, and actions of one rank for its node."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from kielo.ranks.communicator import Startup, in_thread, raise_communicator
from kielo.ranks.flight_record import keep_flight_record
from kielo.ranks.process_settings import allow_open_files, keep_freed_memory
from kielo.ranks.rendezvous import Rendezvous, choose_gloo_interface, find_rendezvous
from kielo.recipe.errors import KieloError, no_more_processes

_MOST_WAITING = 4096  # connections of ranks that come at once
LINGER_SECONDS = 3.0  # for which rank 0 stays after a failed start
_LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"


@dataclass(frozen=True)
class World:
    """This process among all. `store` has marks of arrival, no tensors. Each communicator has
    `timeout_seconds`.

    With `is_rehearsed` the other ranks are not real (`kielo rehearse`), so nothing waits for them.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    timeout_seconds: float
    store: dist.Store = field(repr=False, compare=False)
    host_backend: str = "gloo"
    is_rehearsed: bool = False

    @property
    def startup(self) -> Startup:
        return Startup(self.rank, self.store, self.device, self.timeout_seconds)


_world: World | None = None  # one a process, like torch's default process group
_meeting: tuple[Rendezvous, dist.Store] | None = None  # the store in which the ranks of an attempt meet


def start_world(timeout_seconds: float, device: str | None = None) -> World:
    """Meet the other ranks and make the process group of all. Raises KieloError naming missing ranks.

    `timeout_seconds` limits the meeting and the first all-reduce, each. `device` is "cpu" or "cuda". By
    default it is "cuda" if CUDA or ROCm is found.
    """
    place = find_rendezvous()
    chosen = _device(device, place.local_rank)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    if chosen.type == "cpu":
        keep_freed_memory()
    world = World(
        place.rank, place.size, place.local_rank, chosen, timeout_seconds, meet(place, timeout_seconds)
    )
    try:
        return enter_world(world, backend)
    except KieloError:
        linger(place)
        raise


@contextmanager
def world_of_job(
    timeout_seconds: float, device: str | None = None, leave_seconds: float = 600.0
) -> Iterator[World]:
    """Start the world for a block, and end it. Ranks wait at the end for rank 0, at most `leave_seconds`."""
    world = start_world(timeout_seconds, device)
    try:
        yield world
        leave_together(leave_seconds)
    finally:
        end_world()


def enter_world(world: World, backend: str) -> World:
    global _world
    startup = world.startup
    keep_flight_record()

    def make() -> dist.ProcessGroup | None:
        dist.init_process_group(
            backend, store=world.store, rank=world.rank, world_size=world.size, timeout=startup.group_timeout
        )
        return dist.group.WORLD

    raise_communicator(startup, "world", range(world.size), make)
    _world = world
    return world


def meet(place: Rendezvous, timeout_seconds: float) -> dist.Store:
    global _meeting
    if _meeting is None or _meeting[0] != place:
        _meeting = place, dist.PrefixStore(f"kielo/{place.attempt}", connect(place, timeout_seconds))
    return _meeting[1]


def make_host_group(world: World, name: str, timeout_seconds: float) -> dist.ProcessGroup | None:
    """Make a gloo group of all ranks, which all call it, for a thread beside the training, or None for one
    rank.

    Two ranks connect at their first message. Collectives of one group must come from one thread, in one
    order. Raises KieloError naming the ranks that did not arrive within `timeout_seconds`.
    """
    if world.size == 1:
        return None
    ranks = range(world.size)
    startup = replace(world.startup, device=torch.device("cpu"), timeout_seconds=timeout_seconds)

    def make() -> dist.ProcessGroup:
        os.environ[_LAZY_GLOO] = "1"  # connect at first use (torch 2.10, 2.11 and 2.13)
        try:
            return dist.new_group(
                list(ranks), timeout=startup.group_timeout, backend=world.host_backend, group_desc=name
            )
        finally:
            del os.environ[_LAZY_GLOO]

    return raise_communicator(startup, name, ranks, make)


def leave_together(wait_seconds: float) -> None:
    """Wait until rank 0 is here too, because a launcher may end all ranks when the first exits."""
    if _world is None or _world.size == 1:
        return
    with suppress(RuntimeError):  # rank 0 has died, or needs longer
        if _world.rank == 0:
            _world.store.set("rank 0 is done", "1")
        else:
            _world.store.wait(["rank 0 is done"], timedelta(seconds=wait_seconds))


def end_world(wait_seconds: float = 10.0) -> None:
    """End the process group, rank 0, which serves the store, last. Never raises."""
    global _world, _meeting
    if _world is not None and _world.size > 1:
        with suppress(RuntimeError):  # the store is gone when rank 0 has died
            leaving = _world.store.add("leaving", 1)
            until = time.monotonic() + wait_seconds
            while _world.rank == 0 and leaving < _world.size and time.monotonic() < until:
                time.sleep(0.01)
                leaving = _world.store.add("leaving", 0)
    if dist.is_initialized():
        dist.destroy_process_group()
    _world = _meeting = None


def _device(kind: str | None, local_rank: int) -> torch.device:
    if kind is None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise KieloError(
            'device "cuda" was asked for, but this build of torch sees no GPU. Fix: device = "cpu"'
        )
    # Slurm often shows each task only its own device, which is then number 0 whatever the local rank.
    index = 0 if count == 1 else local_rank
    if index >= count:
        raise KieloError(
            f"local rank {local_rank} has no GPU: this node shows {count}. Fix: start {count} ranks a node"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def connect(place: Rendezvous, timeout_seconds: float) -> dist.Store:
    """Connect this rank to the store, which rank 0 serves unless the launcher does.

    Raises KieloError if rank 0 is not found within the time limit, or too few files may be open.
    """
    if place.size == 1:
        return dist.HashStore()  # in memory: one process needs no port
    allow_open_files(place)
    choose_gloo_interface(place)
    made, serves = [], place.rank == 0 and not place.store_is_running

    def make() -> None:
        store = dist.TCPStore(
            place.host,
            place.port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_seconds),
            # the store's own waiting reports the number of missing ranks, but not which
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_listening_socket(place) if serves else None,
        )
        made.append(store)

    try:
        in_thread(make, "store")
        return made[0]
    except RuntimeError as error:
        if said := no_more_processes(error):
            raise KieloError(f"rank {place.rank}: {said}") from error
        raise KieloError(
            f"rank {place.rank}: no meeting at {place.host}:{place.port} within {timeout_seconds:g} s "
            f"({error}). Fix: let rank 0 run there, with that port free and open"
        ) from error


def _listening_socket(place: Rendezvous) -> int | None:
    """Return a socket that listens only where the ranks meet, or None if that is not on this machine."""
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_MOST_WAITING)
        except OSError:
            listener.close()
            continue
        return listener.detach()
    return None


def linger(place: Rendezvous) -> None:
    """Keep rank 0, which serves the store, alive until the other ranks' time limits have passed too."""
    if place.rank == 0 and place.size > 1 and not place.store_is_running:
        time.sleep(LINGER_SECONDS)


def once_a_node(
    name: str, action: Callable[[], object], place: Rendezvous, meeting: dist.Store, limit_seconds: float
) -> None:
    """Call `action` on one rank of each node, with the same outcome on every rank.

    All ranks call it with the same `name`, once an attempt, also before a run is resolved. Raises KieloError
    on every rank, with the same message, if an action raised or `limit_seconds` passed.
    """
    if place.size == 1:
        action()
        return
    store = dist.PrefixStore(f"once_a_node/{name}", meeting)
    if place.local_rank == 0:
        try:
            action()
        except Exception as error:  # the other ranks must not wait for it
            kind = "" if isinstance(error, KieloError) else f"{type(error).__name__}: "
            store.compare_set("complaint", "", f"{kind}{error}")
    if store.add("settled", 1) == place.size:  # every action has ended
        store.set("verdict", store.get("complaint").decode() if store.check(["complaint"]) else "")
    try:
        store.wait(["verdict"], timedelta(seconds=limit_seconds))
        verdict = store.get("verdict").decode()
    except RuntimeError as error:
        raise KieloError(
            f"rank {place.rank}: waited {limit_seconds:g} s for one rank of each node to {name}, and not all "
            "have ended"
        ) from error
    if verdict:
        linger(place)
        raise KieloError(verdict)
