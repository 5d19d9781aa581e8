"""Start of one communicator at a time: it is made and used once, and ranks that do not arrive are named.

Process groups that are made together, or first used in the middle of a step, can hang without a message (on
LUMI a second process group hung in 13 of 17 four-node starts: laifs-container-recipes#44). So they are made
and warmed one after another, each in a thread that the caller waits for no longer than its time limit; every
rank sets a mark in the store when it arrives, and at the time limit the missing marks name the missing ranks.
"""

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from kielo.recipe.errors import KieloError


def raise_communicator(
    name: str,
    ranks: Sequence[int],
    rank: int,
    store: dist.Store,
    device: torch.device,
    timeout_seconds: float,
    make: Callable[[], dist.ProcessGroup],
) -> dist.ProcessGroup:
    """Calls `make`, sums a one over the new group, and returns the group.

    Args: `name` is the mesh axis (or "world") for messages and marks; `ranks` are the global ranks of the
    group; `store` is seen by all of them. Raises KieloError naming the axis and the ranks that did not arrive
    within `timeout_seconds`, on every rank that did.
    """
    outcome: dict[str, dist.ProcessGroup | BaseException] = {}
    marks = store.clone()  # a store serves one thread at a time, and `make` may be waiting in the other one

    def work() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # the current device belongs to the thread
            group = make()
            _warm(group, len(ranks), device)
            outcome["group"] = group
        except BaseException as error:  # noqa: B036 - handed to the waiting thread, which raises it
            outcome["error"] = error

    marks.set(_mark(name, rank), b"1")
    thread = threading.Thread(target=work, name=f"communicator {name}", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if "group" in outcome:
        return outcome["group"]
    error = outcome.get("error")
    reason = f"failed ({error})" if error else f"was not up after {timeout_seconds:g} s"
    raise KieloError(
        f"rank {rank}: communicator {name!r} {reason}: {who_is_missing(name, ranks, marks)}"
    ) from error


def _warm(group: dist.ProcessGroup, size: int, device: torch.device) -> None:
    count = torch.ones((), device=device)
    dist.all_reduce(count, group=group)
    if count.item() != size:  # .item() also waits for the device: an NCCL group connects here, not in `make`
        raise RuntimeError(f"its first all-reduce counted {count.item():g} ranks instead of {size}")


def who_is_missing(name: str, ranks: Sequence[int], store: dist.Store) -> str:
    """Returns text about the ranks without a mark in `store`."""
    try:
        missing = [rank for rank in ranks if not store.check([_mark(name, rank)])]
    except RuntimeError:  # dist.DistError is one
        return "the store on rank 0 is gone, so rank 0 ended first; its message gives the reason"
    if not missing:
        return (
            f"all {len(ranks)} ranks arrived, but could not communicate; check the network interface "
            "(NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME) and train.start_timeout_seconds"
        )
    shown = ", ".join(map(str, missing[:32])) + (
        f" and {len(missing) - 32} more" if len(missing) > 32 else ""
    )
    plural = "ranks" if len(missing) > 1 else "rank"
    return (
        f"{plural} {shown} did not arrive, {len(ranks) - len(missing)} of {len(ranks)} did; look at the log "
        f"of {plural} {shown}, or raise "
        "train.start_timeout_seconds if they are merely slow"
    )


def _mark(name: str, rank: int) -> str:
    return f"arrived/{name}/{rank}"
