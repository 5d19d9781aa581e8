"""Comparison of replicas: tensors that several ranks hold must be equal on them bit for bit.

Each rank computes a checksum of 8 bytes a tensor on its device, and a small all-reduce along each axis
compares them. Tensors are equal along `replicate` (hybrid sharding), and along `tensor` if a rank of it holds
the whole (norms, biases). Tensors that FSDP2 splits over all ranks have no replica.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from kielo.parallel.materialise import local
from kielo.parallel.mesh import Mesh
from kielo.ranks import objects

AXES = ("replicate", "tensor")  # along which ranks may hold the same part of a tensor
CHUNK_ELEMENTS = 2**22  # 32 MiB of int64 at a time
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Holders(NamedTuple):
    """The ranks along an axis that should hold the same part of a tensor."""

    axis: str
    ranks: tuple[int, ...]
    name: str


@dataclass(frozen=True)
class Difference:
    """A tensor that differs, and the suspect ranks, with which the fewest others agree."""

    name: str
    ranks: tuple[int, ...]


def checksum(tensor: Tensor) -> Tensor:
    """Return int64: the sum of (2 i + 1) × bits of element i. One flipped bit always changes it."""
    flat = local(tensor).detach().contiguous().view(-1)
    flat = flat.view(_INTEGERS[flat.element_size()])
    odd = torch.arange(min(len(flat), CHUNK_ELEMENTS), device=flat.device).mul_(2).add_(1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(flat.split(CHUNK_ELEMENTS)):
        wide = chunk.to(torch.int64)
        total += 2 * CHUNK_ELEMENTS * number * wide.sum()
        total += wide.mul_(odd[: len(chunk)]).sum()
    return total


def axes_with_replicas(mesh: Mesh) -> list[str]:
    """Return the axes of `mesh.parameters` along which tensors may be equal, the same on every rank."""
    return [axis for axis in AXES if mesh.parameters[axis].size() > 1]


def replicated_axes(tensor: Tensor, mesh: Mesh) -> list[str]:
    """Return the axes of `mesh.parameters` along which this rank's part of the tensor must be equal."""
    axes = axes_with_replicas(mesh)
    if not isinstance(tensor, DTensor):
        return axes
    placements = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
    return [axis for axis in axes if axis not in placements or placements[axis].is_replicate()]


class Replicas:
    """The tensors of this rank that others hold too. All ranks of the mesh call `differences` together."""

    def __init__(self, tensors: Mapping[str, Tensor], mesh: Mesh):
        self._mesh, self._axes = mesh, axes_with_replicas(mesh)
        self.exist = bool(self._axes)
        axes = {name: replicated_axes(tensor, mesh) for name, tensor in tensors.items()}
        self._tensors = {name: tensor for name, tensor in tensors.items() if axes[name]}
        self._numbers = {
            axis: [number for number, name in enumerate(self._tensors) if axis in axes[name]]
            for axis in self._axes
        }

    def differences(self) -> list[Difference]:
        """Return the tensors that differ, the same list on every rank. It waits for the device."""
        device = torch.device(self._mesh.parameters.device_type)
        sums = [checksum(tensor).to(device) for tensor in self._tensors.values()]
        differing = torch.zeros(1, dtype=torch.int64, device=device)
        for axis in self._axes:
            of_axis = [sums[number] for number in self._numbers[axis]]
            if of_axis:  # the same tensors on all ranks along the axis
                lowest, highest = _extremes(torch.stack(of_axis), self._group(axis))
                differing += (lowest != highest).sum()
        dist.all_reduce(differing)
        return self._blamed(torch.stack(sums).tolist() if sums else []) if differing.item() else []

    def _blamed(self, sums: list[int]) -> list[Difference]:
        names, mine = list(self._tensors), []
        for axis in self._axes:
            ranks = tuple(dist.get_process_group_ranks(self._group(axis)))
            mine += [(Holders(axis, ranks, names[number]), sums[number]) for number in self._numbers[axis]]
        return blamed(objects.all_gather(mine))

    def _group(self, axis: str) -> dist.ProcessGroup:
        return self._mesh.parameters[axis].get_group()


def blamed(everyone: Sequence[Iterable[tuple[Holders, int]]]) -> list[Difference]:
    """Return the ranks to blame. everyone: (who should hold the same, checksum) of each rank's tensors."""
    held: dict[Holders, dict[int, int]] = defaultdict(dict)
    for rank, sums in enumerate(everyone):
        for holders, value in sums:
            held[holders][rank] = value
    suspicions: dict[str, Counter[int]] = defaultdict(Counter)
    for holders, by_rank in held.items():
        agreeing = Counter(by_rank.values())
        if len(agreeing) == 1:
            continue
        most = max(agreeing.values())
        is_tied = list(agreeing.values()).count(most) > 1
        suspicions[holders.name].update(
            rank for rank, value in by_rank.items() if is_tied or agreeing[value] < most
        )
    return [
        Difference(name, tuple(sorted(rank for rank, count in ranks.items() if count == max(ranks.values()))))
        for name, ranks in suspicions.items()
    ]


def _extremes(sums: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest of each number in the group; ~ reverses their order."""
    both = torch.cat((sums, ~sums))
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return ~both[len(sums) :], both[: len(sums)]
