"""Links between nodes that are slower than the others, by seconds of a copy's first pieces; torch-free."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

COPIES = 3  # copies that a link is judged by
LEAST_TIMES = 2.0  # times the seconds of the median link
LEAST_BYTES = 8 * 2**20  # of a piece: a smaller piece measures the start of sending


@dataclass(frozen=True)
class Arrival:
    """The first piece of a copy that a rank received: its bytes, and the seconds until it arrived."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class SlowLink:
    """The link to `node` from the node before it, its seconds per byte, and the median link's."""

    node: int
    seconds: float
    usual_seconds: float


class SlowLinks:
    """Judge the links by the newest copies. `hosts` has each rank's host, node by node."""

    def __init__(self, hosts: Sequence[str], ranks_a_node: int):
        self._hosts, self._ranks_a_node = hosts[::ranks_a_node], ranks_a_node
        self._copies: deque[list[float]] = deque(maxlen=COPIES)
        self._reported: set[int] = set()

    def look(self, arrivals: Sequence[Arrival | None]) -> str | None:
        """Return a message about links that became slow, or None. `arrivals` has each rank's for a copy."""
        each = [one.seconds / one.num_bytes for one in arrivals if one and one.num_bytes >= LEAST_BYTES]
        if len(each) < len(arrivals):
            return None
        # the fastest of a node's ranks: a single slow rank is not the link's fault
        self._copies.append(
            [min(each[at : at + self._ranks_a_node]) for at in range(0, len(each), self._ranks_a_node)]
        )
        if len(self._copies) < COPIES:
            return None
        found = slow_links(self._copies)
        before, self._reported = self._reported, {link.node for link in found}
        return "; ".join(map(self._described, found)) if self._reported - before else None

    def _described(self, link: SlowLink) -> str:
        rate, usual = 1e-6 / link.seconds, 1e-6 / link.usual_seconds
        ends = f"{self._hosts[link.node - 1]} to {self._hosts[link.node]}"
        return (
            f"the link from {ends} is slow: a rank's bytes arrive at {rate:,.0f} MB/s, over the median link "
            f"at {usual:,.0f} MB/s. Collectives between nodes wait for it, and can lose "
            f"{1 - rate / usual:.0%} of their speed. Fix: leave one of these nodes out"
        )


def slow_links(copies: Sequence[Sequence[float]]) -> list[SlowLink]:
    """Return the links whose fastest copy takes at least `LEAST_TIMES` as long as the slowest usual copy.

    copies: seconds per byte to each node from the node before it. Usual: the (lower) median of a copy.
    """
    usual = [sorted(of_copy)[(len(of_copy) - 1) // 2] for of_copy in copies]
    return [
        SlowLink(node, fmean(of_link), fmean(usual))
        for node, of_link in enumerate(zip(*copies, strict=True))
        if min(of_link) >= LEAST_TIMES * max(usual)
    ]
