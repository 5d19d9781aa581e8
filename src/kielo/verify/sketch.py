"""Sketches of tensors: nine numbers by which two large tensors are compared without being in one place.

A sketch is the sum of squares and eight projections onto vectors of ±1, which are products of one sign for
each index, so that the sketches of parts add up to the whole's sketch. The projections of a difference have
the difference's norm on average (Johnson and Lindenstrauss 1984; Achlioptas 2003), so they tell how far two
tensors are apart, not only whether their norms differ.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kielo.models.piece import Box

PROJECTIONS = 8
Sketch = Sequence[float]  # the sum of squares, then the projections
_SEED = 20_261_128
_AT_ONCE = 2**24  # elements: 128 MiB of fp64


@torch.no_grad()
def sketch_of(part: Tensor, box: Box, shape: Sequence[int]) -> Tensor:
    """Return the sketch [9] in fp64 of a part: the `box` of a tensor of this shape."""
    if not part.numel():
        return torch.zeros(1 + PROJECTIONS, dtype=torch.float64, device=part.device)
    squares = torch.linalg.vector_norm(part, dtype=torch.float64).square()
    signs = [
        _signs(dim, size)[:, one].to(part.device)
        for dim, (size, one) in enumerate(zip(shape, box, strict=True))
    ]
    if not signs:
        return torch.cat([squares.view(1), part.double().expand(PROJECTIONS)])
    # In fp64, some rows at once: in fp32 the whole and its halves were 1.2e-6 apart at a width of 2,816.
    rows, along = part.reshape(-1, part.shape[-1]), signs[-1].double().t()
    blocks = rows.split(max(1, _AT_ONCE // rows.shape[-1]))
    projected = torch.cat([block.double() @ along for block in blocks]).view(*part.shape[:-1], PROJECTIONS)
    for dim in reversed(range(len(signs) - 1)):
        along = signs[dim].double().t()  # [n, 8]
        projected = (projected * along).sum(dim=-2)
    return torch.cat([squares.view(1), projected])


def relative_distance(ours: Sketch, theirs: Sketch, floor: float = 0.0) -> float:
    """Return about ‖ours − theirs‖ / ‖theirs‖, or infinity. floor: the least norm of theirs."""
    squares = sum((one - other) ** 2 for one, other in zip(ours[1:], theirs[1:], strict=True)) / PROJECTIONS
    distance = max(math.sqrt(squares), abs(norm_of(ours) - norm_of(theirs)))
    ratio = distance / max(norm_of(theirs), floor, 1e-30)
    return ratio if math.isfinite(ratio) else math.inf


def norm_of(sketch: Sketch) -> float:
    return math.sqrt(sketch[0]) if sketch[0] >= 0 else math.nan


def farthest(
    ours: Mapping[str, Sketch], theirs: Mapping[str, Sketch], floor: float = 0.0
) -> tuple[str, float]:
    """Return (name, relative distance) of the tensors that are farthest apart."""
    distances = {name: relative_distance(one, theirs[name], floor) for name, one in ours.items()}
    name = max(distances, key=distances.__getitem__)
    return name, distances[name]


def _signs(dim: int, size: int) -> Tensor:
    """Return the signs [8, size] of the indices of a dim, on the CPU."""
    generator = torch.Generator().manual_seed(_SEED + dim)
    return torch.randint(0, 2, (size, PROJECTIONS), generator=generator).mul_(2).sub_(1).t().float()
