"""The job as one of its ranks sees it, which every check looks at, and the form of a check."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kielo.checkpoint.agreement import Agreement
from kielo.parallel.mesh import Mesh
from kielo.ranks.world import World
from kielo.recipe.cards import Accelerator, Cluster, accelerator_of_device
from kielo.recipe.sections import Recipe
from kielo.resolve.resolved import Resolved

# How much each check computes, sends and writes, on GPUs and on CPUs. Constants, not knobs.


@dataclass(frozen=True)
class Sizes:
    """Sizes of the checks on a kind of device.

    matrix: rows and columns of the timed product. products, copies: their numbers in a timed round.
    copy_bytes: bytes copied at once in the device's memory. rounds: timed rounds of products and copies, of
    which the first warms up. message_bytes: buffers of collectives, from a network's protocol for small
    messages to its protocol for large messages. The last is timed. timed_collectives: number of timed calls.
    file_bytes: bytes that each node writes and reads.
    """

    matrix: int
    products: int
    copy_bytes: int
    copies: int
    rounds: int
    message_bytes: tuple[int, ...]
    timed_collectives: int
    file_bytes: int


SIZES = {
    # 8192³ products: 5 rounds of 40 take 2.4 s at the 92 TFLOP/s of one MI250X die, hot enough to throttle.
    "cuda": Sizes(8192, 40, 2**30, 20, 5, (2**10, 2**20, 2**27), 5, 2**29),
    "cpu": Sizes(256, 20, 2**22, 4, 5, (2**10, 2**18), 3, 2**22),
}
FILE_CHUNK_BYTES = 2**20
STEPS = 5  # of training
CLOCK_ROUNDS = 3


@dataclass(frozen=True)
class Job:
    """The job as one rank sees it.

    host: all ranks over the network of the hosts (gloo), so that reports of a broken device network arrive.
    nodes: the node of each rank. nccl_log: the file that NCCL logs to; None on CPUs.
    """

    recipe: Recipe
    resolved: Resolved
    cluster: Cluster
    world: World
    mesh: Mesh
    host: Agreement
    nodes: tuple[str, ...]
    run_folder: Path
    nccl_log: Path | None = None

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.world.device.type]

    @property
    def device_card(self) -> Accelerator | None:
        """The card of the devices that are here, None if no card describes them."""
        device = self.world.device
        return accelerator_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None

    @property
    def is_first_of_node(self) -> bool:
        """True on the lowest rank of each node, which works for the node."""
        return self.nodes.index(self.nodes[self.world.rank]) == self.world.rank

    @property
    def num_nodes(self) -> int:
        return len(set(self.nodes))

    def ranks_of_nodes(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, []).append(rank)
        return found


@dataclass(frozen=True)
class Finding:
    """A fault of a rank, or of the whole job if `rank` is None."""

    rank: int | None
    message: str
    is_refusal: bool = True


@dataclass(frozen=True)
class Check:
    """One check: all ranks measure together, and rank 0 judges the measurements.

    `measure` returns a value for JSON. `judge` takes these values by rank. `summarise` puts them in a line.
    """

    name: str
    measure: Callable[[Job], Any]
    judge: Callable[[Sequence[Any], Job], list[Finding]]
    summarise: Callable[[Sequence[Any], Job], str]


def spread(values: Sequence[float], unit: str) -> str:
    """Return "168 to 171 TFLOP/s", or one number if both ends print alike."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"
