"""Where a rank stands on the axes of the mesh: arithmetic, no torch.

Ranks next to each other differ first in the last axis.
"""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kielo.resolve.resolved import Placement

AXES = ("pipeline", "replicate", "shard", "context", "tensor", "expert")


def coordinates(placement: "Placement", rank: int) -> dict[str, int]:
    """The rank's number along each axis."""
    numbers = {}
    for axis in reversed(AXES):
        rank, numbers[axis] = divmod(rank, getattr(placement, axis))
    return numbers


def rank_of_stage(placement: "Placement", pipeline_rank: int) -> int:
    """The first rank of a pipeline rank, with 0 on all other axes."""
    return pipeline_rank * math.prod(getattr(placement, axis) for axis in AXES if axis != "pipeline")
