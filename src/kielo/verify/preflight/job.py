"""The job as one of its ranks sees it, which every check looks at, and the form of a check."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kielo.checkpoint.agreement import Agreement
from kielo.parallel.mesh import Mesh
from kielo.ranks.world import World
from kielo.recipe.cards import Accelerator, Cluster, accelerator_of_device
from kielo.recipe.sections import Recipe
from kielo.resolve.resolved import Resolved


@dataclass(frozen=True)
class Sizes:
    """How much the checks compute, send and write on a kind of device. Constants, not knobs."""

    matrix: int  # rows and columns of the timed product
    products: int  # in a timed round
    copy_bytes: int  # copied at once in the device's memory
    copies: int  # in a timed round
    rounds: int  # of products and of copies; the first warms up
    # Buffers, from a network's protocol for small messages to that for large messages. The last is timed.
    message_bytes: tuple[int, ...]
    timed_collectives: int
    file_bytes: int  # that each node writes and reads


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
    """The job as one rank sees it."""

    recipe: Recipe
    resolved: Resolved
    cluster: Cluster
    world: World
    mesh: Mesh
    host: Agreement  # all ranks over gloo, so that reports of a broken device network arrive
    nodes: tuple[str, ...]  # of each rank
    run_folder: Path
    nccl_log: Path | None = None  # None on CPUs

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

    def ranks_of_nodes(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, []).append(rank)
        return found

    def wait_for_all(self) -> None:
        if self.world.size > 1:
            dist.barrier(group=self.host.group)


@dataclass(frozen=True)
class Finding:
    rank: int | None  # None: a fault of the whole job
    message: str
    is_refusal: bool = True


@dataclass(frozen=True)
class Check:
    """One check: all ranks measure together, and rank 0 judges the measurements by rank."""

    name: str
    measure: Callable[[Job], Any]  # returns a value for JSON
    judge: Callable[[Sequence[Any], Job], list[Finding]]
    summarise: Callable[[Sequence[Any], Job], str]  # in a line


def spread(values: Sequence[float], unit: str) -> str:
    """Return "168 to 171 TFLOP/s", or one number if both ends print alike."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"
