"""Sums over the parts of DTensors: what each rank computes of its part → what belongs to the whole tensor."""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def sum_over_parts(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the sum of each tensor's values over its parts, the same bits on all ranks that hold any.

    values: [k] of this rank's part of each of `tensors`, on the part's device. A plain tensor is its own and
    only part. Of ranks that hold the same part the first alone counts; the others add zeros, which is exact,
    so that copies cannot drift apart by another order of the sum. All ranks of the tensors' meshes call it
    together, with the same tensors in the same order; each axis costs one all-reduce. Nothing waits for a
    GPU.
    """
    sums = list(values)
    of_mesh: dict[DeviceMesh, list[int]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            of_mesh[tensor.device_mesh].append(number)
    for mesh, numbers in of_mesh.items():
        counted = [
            values[number] if _is_first(tensors[number]) else torch.zeros_like(values[number])
            for number in numbers
        ]
        # communicators work on the mesh's devices; values of offloaded tensors are elsewhere
        total = torch.stack(counted).to(mesh.device_type)
        for axis in reversed(range(mesh.ndim)):
            if mesh.size(axis) > 1:
                dist.all_reduce(total, group=mesh.get_group(axis))
        for number, row in zip(numbers, total.to(counted[0].device)):
            sums[number] = row
    return sums


def _is_first(tensor: DTensor) -> bool:
    """Returns True on the first of the ranks that hold the same part of the tensor."""
    mesh = tensor.device_mesh
    return all(
        mesh.get_local_rank(axis) == 0
        for axis, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )
