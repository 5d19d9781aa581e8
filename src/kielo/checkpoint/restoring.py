"""A verified checkpoint back into tensors of any layout: all ranks fill theirs, or all refuse."""

from pathlib import Path
from typing import Any

import torch

from kielo.artifact.checkpoint_index import CheckpointIndex, read_index
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.read_checkpoint import missing_names
from kielo.checkpoint.safetensors_dtypes import DTYPES
from kielo.checkpoint.safetensors_storage import fill_from_chunks
from kielo.recipe.errors import KieloError


def fill(path: Path, tensors: dict[str, torch.Tensor], ranks: Agreement) -> dict[str, Any]:
    """Fill `tensors` in place from the checkpoint `path`; returns its plain state.

    Each rank reads the index's lines of its own tensors. Raises KieloError on every rank, before any tensor
    changes, for names, shapes or dtypes that the checkpoint cannot fill.
    """
    index = complaint = None
    try:
        index = read_index(path, tensors)
        complaint = missing_names(path, index, tensors) or _misfit(path, index, tensors)
    except KieloError as error:
        complaint = str(error)
    ranks.refuse_together(complaint)
    try:
        ranks.on_all(lambda: fill_from_chunks(path, index, tensors))
    except OSError as error:
        raise KieloError(f"checkpoint {path} cannot be read: {error}") from error
    return index.plain


def _misfit(path: Path, index: CheckpointIndex, tensors: dict[str, torch.Tensor]) -> str | None:
    for name, tensor in tensors.items():
        entry = index.entry(name)
        if tuple(tensor.shape) != entry.shape:
            shapes = f"{list(entry.shape)}, not {list(tensor.shape)} as here"
            return f"checkpoint {path}: {name} has the shape {shapes}"
        if torch.promote_types(DTYPES[entry.dtype], tensor.dtype) != tensor.dtype:
            return f"checkpoint {path}: {name} is stored as {entry.dtype}, which {tensor.dtype} cannot hold"
    return None
