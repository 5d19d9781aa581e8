"""Host copies of a rank's shards for a save; training may change the tensors while they are written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kielo.parallel.materialise import local

_ALIGNMENT = 512  # bytes between the first bytes of two copies are multiples of it


class Staging:
    """One buffer of host memory, kept from save to save, of which the copies are views.

    For tensors on a GPU it is registered with the driver (pinned). torch's allocator of pinned memory is not
    used: it rounds each tensor up to a power of two, and keeps what was freed.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._is_registered = False
        self._copies: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return 0 if self._buffer is None else self._buffer.numel()

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate and touch the memory before a save; fresh memory costs several times the copy."""
        shards = {name: local(tensor) for name, tensor in tensors.items()}
        if all(_is_like(self._copies.get(name), shard) for name, shard in shards.items()):
            return
        self.close()
        ends, end = {}, 0
        for name, shard in shards.items():
            end = ends[name] = -(-end // _ALIGNMENT) * _ALIGNMENT + shard.nbytes
        self._buffer = torch.empty(end, dtype=torch.uint8).zero_()
        if end and any(shard.is_cuda for shard in shards.values()):  # a rank may hold empty shards only
            error = torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), end, 0)
            torch.cuda.check_error(int(error))
            self._is_registered = True
        for name, shard in shards.items():
            copy = self._buffer[ends[name] - shard.nbytes : ends[name]]
            self._copies[name] = copy.view(shard.dtype).view(shard.shape)

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

    def close(self) -> None:
        """Gives the memory back. Copies that were returned are no longer valid."""
        if self._is_registered:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())))
        self._buffer, self._is_registered = None, False
        self._copies.clear()


def _is_like(copy: Tensor | None, shard: Tensor) -> bool:
    return copy is not None and (copy.shape, copy.dtype) == (shard.shape, shard.dtype)
