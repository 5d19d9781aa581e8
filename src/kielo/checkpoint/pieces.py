"""Parameters cut out of whole Hugging Face tensors in memory, and joined again, by a family's `Piece`s."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kielo.models.piece import Box, Piece, stored_shape


def cut(stored: Tensor, piece: Piece, shape: Sequence[int]) -> Tensor:
    """Cuts the parameter of `shape` (padding rows zero) out of the file's tensor; same dtype and device."""
    value = stored.new_zeros(tuple(shape))
    for ours, theirs in piece.boxes(whole_box(shape)):
        part = stored[theirs]
        value[ours] = part.mT if piece.transposed else part
    return value


def join(pieces: Mapping[str, Piece], values: Mapping[str, Tensor]) -> Tensor:
    """Joins our parameters to the file's whole tensor. pieces: our name → its piece, all of one tensor."""
    first = next(iter(values.values()))
    stored = first.new_empty(stored_shape(pieces, {ours: values[ours].shape for ours in pieces}))
    for ours, piece in pieces.items():
        for box, theirs in piece.boxes(whole_box(values[ours].shape)):
            part = values[ours][box]
            stored[theirs] = part.mT if piece.transposed else part
    return stored


def is_finite(values: Tensor) -> bool:
    """Returns True for a tensor without NaN and infinities. Allocates no mask; waits for the device."""
    # aminmax of a tensor with NaN is NaN
    return not values.numel() or bool(torch.stack(values.detach().aminmax()).isfinite().all())


def whole_box(shape: Sequence[int]) -> Box:
    return tuple(slice(0, size) for size in shape)
