"""Masks of attention written out by hand, and capped scores against their formula."""

import pytest
import torch
from torch import Tensor

from kielo.models.blocks import flex
from kielo.models.blocks.attention import InnerAttention, Mask, MaskMaker
from kielo.models.blocks.flex import Seen

CPU = torch.device("cpu")
CAUSAL = """
1....
11...
111..
1111.
11111
"""
BAND_OF_2 = """
1....
11...
.11..
..11.
...11
"""
BOTH_SIDES_OF_2 = """
11...
111..
.111.
..111
...11
"""
DOCUMENTS = """
1....
11...
..1..
..11.
..111
"""
DOCUMENTS_IN_BAND_OF_2 = """
1....
11...
..1..
..11.
...11
"""
# The first document is causal, as its number is negative; the other one is not.
DOCUMENTS_TO_BOTH_SIDES = """
1....
11...
..111
..111
..111
"""
DOCUMENTS_TO_BOTH_SIDES_OF_2 = """
1....
11...
..11.
..111
...11
"""


def drawn(picture: str) -> Tensor:
    return torch.tensor([[mark == "1" for mark in line] for line in picture.split()])


def check(mask: Mask, picture: str | None, is_causal: bool, distance: Tensor | None = None) -> None:
    """picture: None for plain attention."""
    if picture is None:
        assert mask.visible is None
    else:
        assert mask.visible.dtype == torch.bool and torch.equal(mask.visible[0, 0], drawn(picture))
        assert mask.visible.shape == (1, 1, 5, 5)
    assert mask.is_causal == is_causal and mask.blocks is None and mask.positions is None
    assert (mask.distance is None) == (distance is None)
    assert distance is None or torch.equal(mask.distance, distance)


def test_windows_without_documents() -> None:
    """One that is as long as the sequence, or longer, needs no mask; each window is made once."""
    for is_causal, picture in ((True, BAND_OF_2), (False, BOTH_SIDES_OF_2)):
        masks = MaskMaker((None, 2, 5, 6, 2), is_causal=is_causal)(None, None, 5, CPU)
        assert list(masks) == [None, 2, 5, 6]
        for window in (None, 5, 6):
            check(masks[window], None, is_causal)
        check(masks[2], picture, is_causal)
        (only,) = MaskMaker((9,), is_causal=is_causal)(None, None, 5, CPU).values()
        check(only, None, is_causal)
    assert MaskMaker((4,))(None, None, 5, CPU)[4].visible.sum() == 14  # all pairs but that of both ends


def test_documents_with_and_without_windows() -> None:
    """Those of one sequence of two; of an encoder, one of them with a negative number (0 is none)."""
    for is_causal, numbers, all_of_it, in_window in (
        (True, [0, 0, 1, 1, 1], DOCUMENTS, DOCUMENTS_IN_BAND_OF_2),
        (False, [-1, -1, 0, 0, 0], DOCUMENTS_TO_BOTH_SIDES, DOCUMENTS_TO_BOTH_SIDES_OF_2),
    ):
        documents = torch.tensor([[7] * 5, numbers])
        masks = MaskMaker((None, 2, 5), is_causal=is_causal)(documents, None, 5, CPU)
        for window, picture in ((None, all_of_it), (2, in_window), (5, all_of_it)):
            assert masks[window].visible.shape == (2, 1, 5, 5)
            check(Mask(masks[window].visible[1:], is_causal=masks[window].is_causal), picture, is_causal)
        assert torch.equal(masks[None].visible[0, 0], drawn(CAUSAL) if is_causal else torch.ones(5, 5).bool())


def test_distances_are_of_queries_to_earlier_keys() -> None:
    """With ALiBi every window has a mask, and one distance for all."""
    distance = torch.tensor([[query - key for key in range(5)] for query in range(5)])
    masks = MaskMaker((None, 2), needs_distance=True)(None, None, 5, CPU)
    check(masks[None], CAUSAL, True, distance)
    check(masks[2], BAND_OF_2, True, distance)
    part = masks[2].part(slice(1, 3), slice(0, 2))
    assert part.visible.tolist() == [[[[True, True], [False, True]]]]
    assert part.distance.tolist() == [[1, 0], [2, 1]]
    assert MaskMaker((2,))(None, None, 5, CPU)[2].part(slice(1, 3), slice(0, 2)).distance is None


def test_masks_of_some_queries_are_by_their_positions() -> None:
    """The first and the last of four positions against all keys, as a context rank has them."""
    places, keys, documents = torch.tensor([0, 3]), torch.arange(4), torch.tensor([[0, 0, 0, 1]])
    maker = MaskMaker((None, 2))
    masks = maker.masks(places, keys, None, None)
    assert masks[None].visible is None
    assert masks[2].visible[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 0, 1, 1]]
    masks = maker.masks(places, keys, documents[:, places], documents)
    assert masks[None].visible[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]


def test_plain_attention_on_a_gpu_needs_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are for documents, windows that are shorter than the sequence, ALiBi and caps."""
    documents = torch.zeros(1, 5, dtype=torch.int32)
    made: list[Seen] = []
    monkeypatch.setattr(flex, "block_mask", lambda seen, length, device: made.append(seen) or (length, seen))
    for options, needs in (({}, False), ({"needs_distance": True}, True), ({"is_capped": True}, True)):
        for is_causal in (True, False):
            maker = MaskMaker((None, 2, 5), is_causal=is_causal, **options)
            masks = maker.in_blocks(None, 5, CPU)
            has_blocks = {window: mask.blocks is not None for window, mask in masks.items()}
            assert has_blocks == {None: needs, 2: True, 5: needs}
            assert all(mask.visible is None for mask in masks.values())
            assert needs or masks[None].is_causal == masks[5].is_causal == is_causal
            assert masks[2].blocks == (5, Seen(2, None, None, is_causal))
            made.clear()
            assert all(mask.blocks is not None for mask in maker.in_blocks(documents, 5, CPU).values())
            assert [(seen.window, seen.documents_bs is documents) for seen in made] == [
                (None, True),
                (2, True),
                (None, True),
            ]
    positions = torch.tensor([0, 3])
    masks = MaskMaker((None, 2)).in_blocks(documents, 5, CPU, positions)
    assert all(mask.positions is mask.blocks[1].positions_q is positions for mask in masks.values())


@pytest.mark.parametrize("scale", (None, 0.25))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_capped_scores_are_their_formula(scale: float | None, dtype: torch.dtype) -> None:
    """cap × tanh(score / cap) in fp64, two query heads to a key head, with a mask and with none (causal)."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (2 * torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2, 2))
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    for visible in (None, drawn(DOCUMENTS)[None, None]):
        out = InnerAttention(scale=scale, softcap=1.5)(q, k, v, Mask(visible))
        assert out.dtype == dtype
        for head in range(4):
            keys, values = k[:, head // 2].double(), v[:, head // 2].double()
            scores = q[:, head].double() @ keys.mT * (8**-0.5 if scale is None else scale)
            scores = 1.5 * torch.tanh(scores / 1.5)
            seen = drawn(CAUSAL if visible is None else DOCUMENTS)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            difference = (out[:, head].double() - weights @ values).abs().max()
            assert difference < (2e-6 if dtype == torch.float32 else 4e-2)
    plain = InnerAttention(scale=scale)(q, k, v, Mask(None))
    assert (plain - InnerAttention(scale=scale, softcap=1.5)(q, k, v, Mask(None))).abs().max() > 0.05
