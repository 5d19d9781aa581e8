"""Tied tensors: names of one run that share their memory, of which a checkpoint stores one."""

import torch

from kielo.parallel.materialise import local


def tied_names(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Finds the names of tensors that share all their memory with one named before: alias → name.

    Empty shards share nothing.
    """
    first: dict[tuple, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        shard = local(tensor)
        if shard.numel() == 0:
            continue
        memory = (
            shard.untyped_storage().data_ptr(),
            shard.storage_offset(),
            shard.shape,
            shard.stride(),
            shard.dtype,
        )
        if first.setdefault(memory, name) != name:
            tied[name] = first[memory]
    return tied


def untied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors that this rank may have to write: each tied tensor once."""
    tied = tied_names(tensors)
    return {name: tensor for name, tensor in tensors.items() if name not in tied}
