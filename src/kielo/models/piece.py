"""The place of a parameter in Hugging Face's files: the piece of a stored tensor that it is; torch-free.

BLOOM and GPT-NeoX store queries, keys and values fused head by head, GPT-2 side by side and transposed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """Rows of the stored tensor `name` from `first_row` on, in blocks of `block_rows` every `stride_rows`.

    Without `block_rows` the rows are contiguous. transposed: the file has [columns, rows]. rows: the number
    of the parameter's rows in the file, None for all. The other rows are padding and zero.
    """

    name: str
    first_row: int = 0
    block_rows: int | None = None
    stride_rows: int | None = None
    transposed: bool = False
    rows: int | None = None

    def boxes(self, box: Sequence[slice]) -> Iterator[tuple[Box, Box]]:
        """Yield (box of the parameter, box in the file) for each contiguous part of `box`."""
        if not box:
            yield (), ()
            return
        first, *others = box
        stop = first.stop if self.rows is None else min(first.stop, self.rows)
        start = first.start
        while start < stop and all(other.start < other.stop for other in others):
            end, row = stop, self.first_row + start
            if self.block_rows is not None:
                block, within = divmod(start, self.block_rows)
                end = min(stop, (block + 1) * self.block_rows)
                row = self.first_row + block * self.stride_rows + within
            stored = (slice(row, row + end - start), *others)
            yield (slice(start, end), *others), stored[::-1] if self.transposed else stored
            start = end


def fused_by_head(name: str, head_dim: int) -> dict[str, Piece]:
    """Return pieces "q", "k", "v" of a tensor with each head's queries, keys and values (Megatron-LM)."""
    return {part: Piece(name, number * head_dim, head_dim, 3 * head_dim) for number, part in enumerate("qkv")}


def stored_shape(pieces: Mapping[str, Piece], shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Return the shape of the tensor that `pieces` make up. pieces: our name → piece, all of one tensor."""
    rows = 0
    others: tuple[int, ...] = ()
    for ours, piece in pieces.items():
        shape = tuple(shapes[ours])
        if not shape:
            return ()
        rows += shape[0] if piece.rows is None else piece.rows
        others = shape[1:]
    is_transposed = next(iter(pieces.values())).transposed
    return (rows, *others)[::-1] if is_transposed else (rows, *others)


def by_stored_name(pieces: Mapping[str, Piece]) -> dict[str, dict[str, Piece]]:
    """Return stored tensor → our parameters in it with their pieces, in the order of `pieces`."""
    grouped: dict[str, dict[str, Piece]] = {}
    for ours, piece in pieces.items():
        grouped.setdefault(piece.name, {})[ours] = piece
    return grouped
