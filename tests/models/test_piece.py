"""Fused, transposed and padded weights: every number of a parameter is found where Hugging Face keeps it."""

import torch

from kielo.models.piece import Piece, by_stored_name, fused_by_head, stored_shape

HEADS, HEAD_DIM, HIDDEN = 3, 4, 12


def take(stored: torch.Tensor, piece: Piece, shape: tuple[int, ...], box=None) -> torch.Tensor:
    whole = torch.zeros(shape)
    box = box or tuple(slice(0, size) for size in shape)
    for ours, theirs in piece.boxes(box):
        found = stored[theirs]
        whole[ours] = found.T if piece.transposed else found
    return whole[box]


def test_fused_heads_side_by_side_and_padding():
    """BLOOM's [heads, 3, head_dim], GPT-2's transposed thirds and a padded vocabulary,
    against torch's own views.
    """
    fused = torch.randn(HEADS * 3 * HEAD_DIM, HIDDEN)
    by_head = fused.view(HEADS, 3, HEAD_DIM, HIDDEN)
    for part in range(3):
        piece = Piece("qkv", part * HEAD_DIM, HEAD_DIM, 3 * HEAD_DIM)
        expected = by_head[:, part].reshape(HEADS * HEAD_DIM, HIDDEN)
        assert torch.equal(take(fused, piece, (HIDDEN, HIDDEN)), expected)
        box = (slice(3, 9), slice(2, 5))  # begins and ends within heads
        assert torch.equal(take(fused, piece, (HIDDEN, HIDDEN), box), expected[box])
        assert len(list(piece.boxes(box))) == 3
    beside = torch.randn(HIDDEN, 3 * HIDDEN)
    keys = Piece("c_attn", first_row=HIDDEN, transposed=True)
    assert torch.equal(take(beside, keys, (HIDDEN, HIDDEN)), beside[:, HIDDEN : 2 * HIDDEN].T)
    rows = torch.randn(5, 2)
    padded = take(rows, Piece("embed", rows=5), (8, 2))
    assert torch.equal(padded[:5], rows) and not padded[5:].any()
    assert not list(Piece("embed", rows=5).boxes((slice(6, 8), slice(0, 2))))


def test_the_pieces_of_a_tensor_make_up_its_shape():
    """An export then writes a tensor of Hugging Face's own shape."""
    pieces = {part: Piece("c_attn", n * HIDDEN, transposed=True) for n, part in enumerate("qkv")}
    pieces["embed"] = Piece("wte", rows=5)
    grouped = by_stored_name(pieces)
    shapes = dict.fromkeys("qkv", (HIDDEN, HIDDEN)) | {"embed": (8, 2)}
    assert stored_shape(grouped["c_attn"], shapes) == (HIDDEN, 3 * HIDDEN)
    assert stored_shape(grouped["wte"], shapes) == (5, 2)


def test_boxes_by_hand() -> None:
    """Heads of 3 rows, 12 rows apart, from row 6 on; what lies beyond the file's rows is left out."""
    piece = Piece("a", first_row=6, block_rows=3, stride_rows=12, rows=8)
    columns = slice(1, 5)
    assert list(piece.boxes((slice(2, 11), columns))) == [
        ((slice(2, 3), columns), (slice(8, 9), columns)),
        ((slice(3, 6), columns), (slice(18, 21), columns)),
        ((slice(6, 8), columns), (slice(30, 32), columns)),
    ]
    assert not list(piece.boxes((slice(2, 11), slice(5, 5))))
    assert not list(piece.boxes((slice(8, 11), columns))) and not list(piece.boxes((slice(2, 2), columns)))
    turned = Piece("a", first_row=6, transposed=True)
    assert list(turned.boxes((slice(2, 4), columns))) == [((slice(2, 4), columns), (columns, slice(8, 10)))]
    assert list(Piece("a").boxes(())) == [((), ())]
    assert fused_by_head("a", 5) == {
        "q": Piece("a", 0, 5, 15), "k": Piece("a", 5, 5, 15), "v": Piece("a", 10, 5, 15),
    }  # fmt: skip


def test_stored_shapes_by_hand() -> None:
    """Rows are added up, those of padding left out; a number has no rows."""
    pieces = {"q": Piece("a"), "k": Piece("a", 4, rows=3)}
    assert stored_shape(pieces, {"q": (4, 7), "k": (9, 7)}) == (7, 7)
    assert stored_shape(pieces, {"q": (4,), "k": (9,)}) == (7,)
    assert stored_shape({"s": Piece("a")}, {"s": ()}) == ()
    assert list(by_stored_name({"b": Piece("x"), "a": Piece("y"), "c": Piece("x")})) == ["x", "y"]
