"""Host copies of a rank's shards for a save; training may change the tensors while they are written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kielo.parallel.materialise import local


class Staging:
    """Host memory as large as the tensors, kept from save to save; pinned for tensors on a GPU."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate and touch the memory before a save; fresh memory costs several times the copy."""
        for name, tensor in tensors.items():
            shard, copy = local(tensor), self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (shard.shape, shard.dtype):
                memory = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
                self._copies[name] = memory.zero_()

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies the tensors: name → this rank's shard as it is now; valid until the next call."""
        self.reserve(tensors)
        is_on_gpu = False
        for name, tensor in tensors.items():
            shard = local(tensor)
            self._copies[name].copy_(shard, non_blocking=True)
            is_on_gpu |= shard.is_cuda
        if is_on_gpu:
            torch.cuda.current_stream().synchronize()
        return {name: self._copies[name] for name in tensors}
