"""Coordinates of ranks on the axes of the mesh, in a resolved layout: arithmetic, no torch.

Ranks next to each other differ first in the last axis.
"""

import math

from kielo.recipe.sections import Layout

AXES = ("pipeline", "replicate", "shard", "context", "tensor", "expert")


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Returns the rank's number along each axis."""
    numbers = {}
    for axis in reversed(AXES):
        rank, numbers[axis] = divmod(rank, getattr(layout, axis))
    return numbers


def rank_of_stage(layout: Layout, pipeline_rank: int) -> int:
    """Returns the first rank of a pipeline rank: the one with 0 on all other axes."""
    return pipeline_rank * math.prod(getattr(layout, axis) for axis in AXES if axis != "pipeline")


def lengths_that_split(sequence_length: int, ranks: int) -> list[int]:
    """Return the nearest lengths, below and above, that split into two equal blocks for each context rank."""
    below = sequence_length // (2 * ranks) * 2 * ranks
    return [length for length in (below, below + 2 * ranks) if length]
