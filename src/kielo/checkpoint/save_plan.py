"""The plan of a save: which rank writes which chunk, and each tensor's entry in the index.

A plan does not depend on values, so it is kept until names, shapes, dtypes or layout change. A new plan at
each save would hold rank 0's interpreter lock beside the training.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import starmap
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from kielo.artifact.checkpoint_folder import rank_file_name
from kielo.artifact.checkpoint_index import Chunk, TensorEntry, chunk_key, entry_json
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.tensor_table import DTYPE_NAMES, DTYPES, nbytes
from kielo.parallel.materialise import local, local_slices
from kielo.recipe.errors import KieloError


def tied_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Find tensors that share all their memory with an earlier tensor: alias → name. Empty shards do not."""
    first: dict[tuple, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        shard = local(tensor)
        place = shard.untyped_storage().data_ptr(), shard.storage_offset()
        memory = (*place, shard.shape, shard.stride(), shard.dtype)
        if shard.numel() and first.setdefault(memory, name) != name:
            tied[name] = first[memory]
    return tied


def untied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that this rank may have to write: each tied tensor once."""
    tied = tied_names(tensors)
    return {name: tensor for name, tensor in tensors.items() if name not in tied}


class HeldChunk(NamedTuple):
    """The part of a tensor of the shape `whole` that one rank has: `shape` elements from `offset`."""

    name: str
    dtype: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WholePlan:
    """The plan of all ranks, on rank 0: entries of the index as JSON, aliases of tied names, sizes."""

    entries: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    tensor_bytes: int = 0
    num_files: int = 0


@dataclass(frozen=True)
class SavePlan:
    held: list[HeldChunk]  # by this rank
    tied: dict[str, str]
    written: list[HeldChunk]  # by this rank
    whole: WholePlan  # empty but on rank 0


class SavePlanner:
    """A maker of save plans. It keeps a plan until a rank's tensors differ. All ranks call it together."""

    def __init__(self, ranks: Agreement):
        self._ranks = ranks
        self._kept: SavePlan | None = None
        self.whole = WholePlan()
        self.num_planned = 0

    def plan(self, tensors: Mapping[str, Tensor]) -> SavePlan:
        """Raise KieloError on every rank if the ranks' chunks do not make up a tensor."""
        held, tied, kept = held_chunks(tensors), tied_names(tensors), self._kept
        is_kept = kept is not None and (kept.held, kept.tied) == (held, tied)
        if not all(self._ranks.gather(is_kept)) or kept is None:
            self._kept, self.whole = None, WholePlan()
            # As one text: so millions of chunks of thousands of ranks are read tens of times faster.
            written = self._ranks.distribute((json.dumps(held), tied), self._plan_all)
            kept = self._kept = SavePlan(held, tied, [held[position] for position in written], self.whole)
        return kept

    def _plan_all(self, of_ranks: list[tuple[str, dict[str, str]]]) -> list[list[int]]:
        def chunk(name: str, dtype: str, *boxes: list[int]) -> HeldChunk:
            return HeldChunk(name, dtype, *map(tuple, boxes))

        held = [[*starmap(chunk, json.loads(text))] for text, _ in of_ranks]
        self.num_planned += sum(map(len, held))
        aliases = {alias: name for _, tied in of_ranks for alias, name in tied.items()}
        written, self.whole = plan_all(held, aliases)
        return written


def plan_all(of_ranks: list[list[HeldChunk]], aliases: dict[str, str]) -> tuple[list[list[int]], WholePlan]:
    """Plan the save of all ranks: each chunk once, by the holder that has the least to write so far.

    aliases: names that are not stored. Return for each rank the positions of the chunks that it writes, wide
    dtypes first. Raise KieloError if the chunks do not make up a tensor.
    """
    written: list[list[int]] = [[] for _ in of_ranks]
    loads = [0] * len(of_ranks)
    entries = {}
    for name, chunks in _by_tensor(of_ranks, aliases).items():
        stored = []
        for offset, (chunk, holders) in chunks.items():
            rank = min(holders, key=loads.__getitem__)
            written[rank].append(holders[rank])
            loads[rank] += nbytes(DTYPES[chunk.dtype], chunk.shape)
            stored.append(Chunk(offset, chunk.shape, rank_file_name(rank), chunk_key(name, offset)))
        if sum(prod(chunk.shape) for chunk in stored) != prod(chunk.whole):
            raise KieloError(f"the ranks' parts of {name} do not make up its shape {list(chunk.whole)}")
        entries[name] = entry_json(TensorEntry(chunk.dtype, chunk.whole, tuple(stored)))
    for positions, held in zip(written, of_ranks, strict=True):
        sizes = [DTYPES[chunk.dtype].itemsize for chunk in held]
        positions.sort(key=sizes.__getitem__, reverse=True)
    return written, WholePlan(entries, aliases, sum(loads), sum(map(bool, written)))


def held_chunks(tensors: Mapping[str, Tensor]) -> list[HeldChunk]:
    """List this rank's parts of the tensors, without empty parts of tensors with elements."""
    held = []
    for name, tensor in tensors.items():
        box = local_slices(tensor)
        offset, shape = tuple(part.start for part in box), tuple(part.stop - part.start for part in box)
        if prod(shape) or not tensor.numel():
            held.append(HeldChunk(name, DTYPE_NAMES[local(tensor).dtype], tuple(tensor.shape), offset, shape))
    return held


def _by_tensor(
    of_ranks: list[list[HeldChunk]], aliases: Mapping[str, str]
) -> dict[str, dict[tuple[int, ...], tuple[HeldChunk, dict[int, int]]]]:
    """Return tensor → offset → (chunk, rank that holds it → position there), without tied names."""
    tensors: dict[str, dict[tuple[int, ...], tuple[HeldChunk, dict[int, int]]]] = {}
    for rank, held in enumerate(of_ranks):
        for position, chunk in enumerate(held):
            if chunk.name in aliases:
                continue
            chunks = tensors.setdefault(chunk.name, {})
            first, holders = chunks.setdefault(chunk.offset, (chunk, {}))
            holders[rank] = position
            known = next(iter(chunks.values()))[0]
            if first.shape != chunk.shape or known[:3] != chunk[:3]:
                raise KieloError(f"{chunk.name} is not the same tensor on rank {rank} as on others")
    return tensors
