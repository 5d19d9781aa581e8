"""The tensors of an export, by blocks of rows, so that memory does not grow with the model."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kielo.artifact.checkpoint_index import CheckpointIndex, TensorEntry
from kielo.checkpoint import tensor_table
from kielo.checkpoint.export_stage import DTYPE_NAMES, SOURCE
from kielo.checkpoint.tensor_file import ReadBuffers, TensorFile, Wanted
from kielo.checkpoint.tensor_table import DTYPES, StoredTensor, moved
from kielo.models import families
from kielo.models.piece import Box, Piece, by_stored_name, stored_shape
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import CompleteModel

BLOCK_BYTES = 64 * 2**20
# Value of `kielo export --dtype` → the dtype of every tensor.
EXPORT_DTYPES = dict(zip(DTYPE_NAMES, (torch.float32, torch.bfloat16, torch.float16), strict=True))


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a Hugging Face file. pieces: our parameter → its place in the tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Mapping[str, Piece]

    @property
    def bytes(self) -> int:
        return tensor_table.nbytes(self.dtype, self.shape)


def file_tensors(index: CheckpointIndex, model: CompleteModel, dtype: str) -> list[FileTensor]:
    """List the tensors of an export in the model's order. The checkpoint must have every parameter.

    dtype: a key of EXPORT_DTYPES, or "source", as in the checkpoint's `source_tensors`. KieloError if
    that record does not fit the model.
    """
    names = families.module(model.model_type, "tables")
    grouped = by_stored_name(names.to_hugging_face(model))
    source = index.plain.source_tensors if dtype == SOURCE else {}
    if model.tie_word_embeddings:
        head = names.to_hugging_face(model.model_copy(update={"tie_word_embeddings": False}))["head.weight"]
        # Some files of tied models contain the head too.
        if head.name in source if dtype == SOURCE else getattr(names, "STORES_TIED_HEAD", False):
            grouped[head.name] = {"embed.weight": head}
    prefix, tensors = getattr(names, "BASE_MODEL_PREFIX", ""), []
    for name, pieces in grouped.items():
        shapes = {ours: index.entry(f"model/{ours}").shape for ours in pieces}
        as_stored = (name, EXPORT_DTYPES[dtype]) if dtype != SOURCE else _in_source(name, source, prefix)
        tensors.append(FileTensor(*as_stored, stored_shape(pieces, shapes), pieces))
    return tensors


def _in_source(name: str, source: Mapping[str, str], prefix: str) -> tuple[str, torch.dtype]:
    for found in (name, name.removeprefix(prefix)):
        if found in source:
            return found, DTYPES[source[found]]
    raise KieloError(
        f"the checkpoint's record of the weights that it began from (source_tensors) does not name {name}. "
        f"Fix: --dtype {', '.join(EXPORT_DTYPES)}"
    )


def row_boxes(shape: Sequence[int]) -> Iterator[Box]:
    """Divide a tensor into boxes of rows (dim 0), each at most BLOCK_BYTES of fp32 or one row."""
    if not shape:
        yield ()
        return
    step = max(1, BLOCK_BYTES // max(1, 4 * math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield (slice(start, min(start + step, shape[0])), *tensor_table.whole_box(shape[1:]))


def row_blocks(tensor: FileTensor) -> Iterator[slice]:
    for box in row_boxes(tensor.shape):
        yield box[0] if box else slice(0, 1)


class NotFiniteError(KieloError):
    """A weight is NaN or infinite, or would be in the dtype of the export."""


class CheckpointRows:
    """A reader of blocks of rows from the checkpoint in `folder`, which has been verified."""

    def __init__(self, folder: Path, index: CheckpointIndex):
        self._folder, self._index = folder, index
        self._buffers = ReadBuffers()
        self._tables: dict[str, dict[str, StoredTensor]] = {}

    def read(self, tensor: FileTensor, rows: slice) -> Tensor:
        block = self._filled(tensor, rows, tensor.dtype)
        if not tensor_table.is_finite(block):
            raise NotFiniteError(self._not_finite(tensor))
        return block

    def _not_finite(self, tensor: FileTensor) -> str:
        num_bad, largest = 0, 0.0
        for rows in row_blocks(tensor):
            exact = self._filled(tensor, rows, torch.float32)
            finite = exact[exact.isfinite()]
            num_bad += exact.numel() - finite.numel()
            largest = max(largest, finite.abs().max().item() if finite.numel() else 0.0)
        if num_bad:
            return (
                f"{self._folder}: {tensor.name} has {num_bad:,} of {math.prod(tensor.shape):,} numbers that "
                "are NaN or infinite. Fix: an earlier checkpoint (`kielo checkpoint list RUN`)"
            )
        asked = next(name for name, dtype in EXPORT_DTYPES.items() if dtype == tensor.dtype)
        fits = [name for name, dtype in EXPORT_DTYPES.items() if torch.tensor(largest).to(dtype).isfinite()]
        return (
            f"{tensor.name} has a weight of magnitude {largest:,.0f}, and {asked} ends at "
            f"{torch.finfo(tensor.dtype).max:,.0f}. Fix: --dtype {' or '.join(fits)}"
        )

    def _filled(self, tensor: FileTensor, rows: slice, dtype: torch.dtype) -> Tensor:
        block = torch.empty((rows.stop - rows.start, *tensor.shape[1:]) if tensor.shape else (), dtype=dtype)
        filled = 0
        wanted: dict[str, list[Wanted]] = {}
        for ours, piece in tensor.pieces.items():
            entry = self._index.entry(f"model/{ours}")
            for box, stored in piece.boxes(tensor_table.whole_box(entry.shape)):
                for part, inside in _in_rows(box, stored, rows, piece.transposed):
                    target = block[inside]
                    filled += target.numel()
                    self._want(wanted, entry, part, target.mT if piece.transposed else target)
        if filled != block.numel():
            raise ValueError(f"{tensor.name}: its pieces fill {filled} of {block.numel()} elements in {rows}")
        for name, of_file in wanted.items():
            with TensorFile(self._folder / name, self._tables[name], self._buffers) as file:
                file.read(of_file)
        return block

    def _want(self, wanted: dict[str, list[Wanted]], entry: TensorEntry, box: Box, target: Tensor) -> None:
        for chunk in entry.chunks:
            if (shared := tensor_table.overlap(box, chunk)) is not None:
                if chunk.file not in self._tables:
                    self._tables[chunk.file] = tensor_table.read_table(self._folder / chunk.file)
                stored = self._tables[chunk.file][chunk.key]
                into = target[moved(shared, [part.start for part in box])]
                wanted.setdefault(chunk.file, []).append(Wanted(stored, moved(shared, chunk.offset), into))


def _in_rows(box: Box, stored: Box, rows: slice, is_transposed: bool) -> Iterator[tuple[Box, Box]]:
    """Yield the part of a parameter's box (`stored` in the file) in those rows, its place in the block."""
    if not stored:
        yield box, stored
        return
    first, *others = stored
    start, stop = max(first.start, rows.start), min(first.stop, rows.stop)
    if start < stop:
        axis = len(box) - 1 if is_transposed else 0
        begin = box[axis].start + start - first.start
        part = (*box[:axis], slice(begin, begin + stop - start), *box[axis + 1 :])
        yield part, (slice(start - rows.start, stop - rows.start), *others)
