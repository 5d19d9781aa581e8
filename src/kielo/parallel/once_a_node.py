"""Actions that one rank of each node does for its node, with the same outcome on every rank.

They need no process group, only the store in which the ranks meet, so they can run before a run is resolved.
"""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from kielo.parallel.rendezvous import Rendezvous
from kielo.parallel.world import linger
from kielo.recipe.errors import KieloError


def once_a_node(
    name: str, action: Callable[[], object], place: Rendezvous, meeting: dist.Store, limit_seconds: float
) -> None:
    """Calls `action` on the ranks of local rank 0; the others wait for all of these, at most `limit_seconds`.

    Called by all ranks with the same `name`, once an attempt. meeting: the store of `world.meet`. Raises
    KieloError on every rank, with the same message, where an action raised one, and on a rank that has waited
    too long.
    """
    if place.size == 1:
        action()
        return
    store = dist.PrefixStore(f"once_a_node/{name}", meeting)
    if place.local_rank == 0:
        complaint = _complaint(action)
        if complaint:
            store.compare_set("complaint", "", complaint)
    if store.add("settled", 1) == place.size:  # the last one: every action has ended
        store.set("verdict", store.get("complaint") if store.check(["complaint"]) else b"")
    try:
        store.wait(["verdict"], timedelta(seconds=limit_seconds))
        verdict = store.get("verdict").decode()
    except RuntimeError as error:
        raise KieloError(
            f"rank {place.rank}: waited {limit_seconds:g} s for one rank of each node to {name}, and not "
            "all have come to an end"
        ) from error
    if verdict:
        linger(place)
        raise KieloError(verdict)


def _complaint(action: Callable[[], object]) -> str | None:
    try:
        action()
    except KieloError as error:
        return str(error)
    except Exception as error:  # the others must not wait for it
        return f"{type(error).__name__}: {error}"
    return None
