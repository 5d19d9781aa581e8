"""Storage of torch's distributed checkpoint (DCP): its plans in, safetensors files and a JSON index out.

DCP's own storage pickles its metadata and notices no flipped bit; this one does neither. DCP calls, in order:
every rank `prepare_local_plan`, rank 0 `prepare_global_plan`, every rank `write_data`, rank 0 `finish`; an
error on any rank reaches all of them.
"""

import math
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint import SavePlan, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from kielo.artifact.checkpoint_folder import INDEX_NAME, rank_file_name
from kielo.artifact.checkpoint_index import CheckpointIndex, Chunk, TensorEntry, chunk_key, write_index
from kielo.checkpoint.publish import refuse_if_too_full
from kielo.checkpoint.safetensors_dtypes import DTYPE_NAMES, DTYPES
from kielo.checkpoint.safetensors_stream import SafetensorsStream

_DESCRIPTION_BYTES = 512  # of one chunk, in its file's header and in the index together, beside its name


class SafetensorsStorageWriter(StorageWriter):
    """Writes one checkpoint into `folder`, which rank 0 makes: the index, and a file a rank with chunks.

    index: without tensors, which `finish` adds. copies: name → this rank's shard, which is written instead of
    the live one. After `finish`, rank 0 has the whole `index`, the record of each of the `files` for
    the manifest, and `tensor_bytes`.
    """

    def __init__(self, folder: Path, index: CheckpointIndex, rank: int, copies: Mapping[str, torch.Tensor]):
        self.folder, self.index, self.rank, self._copies = Path(folder), index, rank, copies
        self.files: dict[str, dict[str, Any]] = {}
        self.tensor_bytes = 0

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave out the empty chunks that ranks hold of a tensor with fewer rows than ranks."""
        return replace(plan, items=[item for item in plan.items if not _is_empty_chunk(item)])

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Rank 0 alone: foresee a full disk before a byte is written, and make the folder."""
        items = [item for plan in plans for item in plan.items]
        self.tensor_bytes = sum(map(_chunk_bytes, items))
        described = sum(_DESCRIPTION_BYTES + 3 * len(item.index.fqn) for item in items) + len(
            self.index.to_json()
        )
        refuse_if_too_full(
            self.folder.parent,
            num_bytes=self.tensor_bytes + described,
            # Besides the ranks' files: index, manifest, the folder itself, and the symbolic link.
            num_files=sum(bool(plan.items) for plan in plans) + 4,
        )
        self.folder.mkdir()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks into its file, one at a time. Each result carries the file's record."""
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        name = rank_file_name(self.rank)
        items = sorted(plan.items, key=lambda item: -item.tensor_data.properties.dtype.itemsize)
        save_id = {"save_id": self.index.save_id}
        stream = SafetensorsStream(self.folder / name, [_stream_entry(item) for item in items], save_id)
        try:
            for item in items:
                stream.write(self._copies[item.index.fqn])
            record = stream.close() | save_id
        except BaseException:
            stream.abandon()
            raise
        done.set_result([WriteResult(item.index, _chunk_bytes(item), (name, record)) for item in items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0 alone, when every rank has written: write the index."""
        home = {}
        for result in (result for of_rank in results for result in of_rank):
            name, record = result.storage_data
            home[result.index], self.files[name] = name, record
        tensors = {
            name: TensorEntry(
                DTYPE_NAMES[stored.properties.dtype],
                tuple(stored.size),
                tuple(
                    _chunk(name, chunk, home[MetadataIndex(name, chunk.offsets)]) for chunk in stored.chunks
                ),
            )
            for name, stored in metadata.state_dict_metadata.items()
        }
        self.index = replace(self.index, tensors=tensors)
        self.files[INDEX_NAME] = write_index(self.folder, self.index)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


class SafetensorsStorageReader(StorageReader):
    """Reads chunks of a checkpoint by its index; a tied name reads the tensor that it is tied to."""

    def __init__(self, folder: Path, index: CheckpointIndex):
        self.folder, self.index = Path(folder), index
        self._home: dict[MetadataIndex, Chunk] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Converts the index to DCP's metadata; a tied name becomes an entry of its own."""
        described = {}
        for name in self.index.names():
            entry = self.index.entry(name)
            boxes = [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.shape)) for c in entry.chunks]
            properties = TensorProperties(dtype=DTYPES[entry.dtype])
            described[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), boxes)
            self._home.update({MetadataIndex(name, chunk.offset): chunk for chunk in entry.chunks})
        return Metadata(described)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy each planned box straight from the mapped file into its tensor."""
        by_file = defaultdict(list)
        for item in plan.items:
            by_file[self._home[item.storage_index].file].append(item)
        for name, items in by_file.items():
            with safe_open(self.folder / name, framework="pt") as file, torch.no_grad():
                for item in items:
                    box = tuple(map(_span, item.storage_offsets, item.lengths))
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(read_box(file, self._home[item.storage_index].key, box))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def read_box(file: Any, key: str, box: tuple[slice, ...]) -> torch.Tensor:
    """Reads a box of a tensor in an open safetensors file, and only its bytes. Empty box: a scalar."""
    return file.get_slice(key)[box] if box else file.get_tensor(key)


def _span(start: int, length: int) -> slice:
    return slice(start, start + length)


def _chunk_bytes(item: WriteItem) -> int:
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _is_empty_chunk(item: WriteItem) -> bool:
    return _chunk_bytes(item) == 0 and math.prod(item.tensor_data.size) > 0


def _stream_entry(item: WriteItem) -> tuple[str, torch.dtype, tuple[int, ...]]:
    key = chunk_key(item.index.fqn, item.tensor_data.chunk.offsets)
    return key, item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)


def _chunk(name: str, box: ChunkStorageMetadata, file: str) -> Chunk:
    return Chunk(tuple(box.offsets), tuple(box.sizes), file, chunk_key(name, box.offsets))
