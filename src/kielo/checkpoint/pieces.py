"""Parameters cut out of Hugging Face's tensors, and put back: whole tensors in memory, along a family's
`Piece`s.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kielo.models.piece import Box, Piece, stored_shape


def cut(stored: Tensor, piece: Piece, shape: Sequence[int]) -> Tensor:
    """The parameter of `shape` (padding rows zero) out of the file's whole tensor; same dtype and device."""
    value = stored.new_zeros(tuple(shape))
    for ours, theirs in piece.boxes(whole_box(shape)):
        part = stored[theirs]
        value[ours] = part.mT if piece.transposed else part
    return value


def join(pieces: Mapping[str, Piece], values: Mapping[str, Tensor]) -> Tensor:
    """The file's whole tensor from our parameters in it (`pieces`: our name → its piece, all of
    one tensor).
    """
    first = next(iter(values.values()))
    stored = first.new_empty(stored_shape(pieces, {ours: values[ours].shape for ours in pieces}))
    for ours, piece in pieces.items():
        for box, theirs in piece.boxes(whole_box(values[ours].shape)):
            part = values[ours][box]
            stored[theirs] = part.mT if piece.transposed else part
    return stored


def is_finite(values: Tensor) -> bool:
    """True for a tensor without NaN and infinities. Takes no memory for a mask; waits for the device."""
    # NaN is both ends
    return not values.numel() or bool(torch.stack(values.detach().aminmax()).isfinite().all())


def whole_box(shape: Sequence[int]) -> Box:
    return tuple(slice(0, size) for size in shape)
