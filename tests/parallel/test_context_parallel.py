"""Attention split over context ranks is attention on one rank:
values, gradients, documents, and equal work.
"""

from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kielo.models.blocks.alibi import Alibi
from kielo.models.blocks.attention import InnerAttention, MaskMaker
from kielo.models.blocks.dropout import NoiseMaker
from kielo.parallel.context_parallel import (
    apply_context_parallel,
    context_positions,
    in_rank_order,
    in_sequence_order,
)
from kielo.parallel.recompute import apply_recompute
from kielo.ranks.world import start_world
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout
from tests.started_ranks import run_ranks

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 32, 8, 4
FORMS = get_args(Layout.model_fields["context_attention"].annotation)


def projections(kv_heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and the gradient of the output: [b, h, s, k], strided as a projection leaves them."""
    generator = torch.Generator().manual_seed(1)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    return [
        torch.randn(BATCH, LENGTH, number, HEAD_DIM, generator=generator).to(dtype).transpose(1, 2)
        for number in heads
    ]


def documents() -> Tensor:
    """[b, s] int32: borders inside blocks, on a block's edge, and a document over several blocks."""
    borders = ([3, 8, 21], [1, 13, 30])
    return torch.stack([(torch.arange(LENGTH)[:, None] >= torch.tensor(row)).sum(1) for row in borders]).int()


# Kinds of scores: plain, with BLOOM's slopes, or Gemma's cap within a window of 9 tokens.
SCORES = ("plain", "alibi", "capped")
WINDOW = {"plain": None, "alibi": None, "capped": 9, "encoder": None}


def model(scores: str = "plain") -> nn.Module:
    """The part of a model that `apply_context_parallel` changes."""
    whole, layer = nn.Module(), nn.Module()
    whole.make_masks, layer.attention = (
        MaskMaker((None, WINDOW[scores]), scores == "alibi", is_causal=scores != "encoder"),
        nn.Module(),
    )
    layer.attention.inner = InnerAttention(
        softcap=2.0 if scores == "capped" else None, alibi=Alibi(HEADS) if scores == "alibi" else None
    )
    layer.attention.window = WINDOW[scores]
    whole.layers = nn.ModuleDict({"0": layer})
    return whole


def attend(
    whole: nn.Module, tensors: list[Tensor], documents_bs: Tensor | None, positions_s: Tensor
) -> list[Tensor]:
    """[output, dq, dk, dv] of the model's attention."""
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in tensors[:3])
    attention = whole.layers["0"].attention
    masks = whole.make_masks(documents_bs, positions_s, len(positions_s), positions_s.device)
    out = attention.inner(q, k, v, masks[attention.window])
    out.backward(tensors[3])
    return [out.detach(), q.grad, k.grad, v.grad]


def laid(form: str, ranks: int, scores: str = "plain") -> nn.Module:
    split = model(scores)
    axis = SimpleNamespace(get_group=lambda: torch.distributed.group.WORLD)
    apply_context_parallel(split, {"context": axis}, SimpleNamespace(context=ranks, context_attention=form))
    return split


def places_on_rank(form: str, ranks: int) -> tuple[int, list[list[int]]]:
    """(rank, the places in their documents of the tokens that the rank holds)."""
    world = start_world(60, "cpu")
    positions = context_positions(LENGTH, ranks, world.rank)
    return world.rank, laid(form, ranks).make_masks.places(documents()[:, positions], positions).tolist()


@pytest.mark.parametrize("form", FORMS)
def test_places_in_documents_count_through_the_ranks(form: str) -> None:
    """By a plain count of tokens since a document's first one, which another rank may hold."""
    plain = []
    for row in documents().tolist():
        counted = [0]
        for before, here in zip(row, row[1:]):
            counted.append(counted[-1] + 1 if here == before else 0)
        plain.append(counted)
    for rank, places in run_ranks(places_on_rank, 2, form, 2):
        columns = context_positions(LENGTH, 2, rank).tolist()
        assert places == [[row[column] for column in columns] for row in plain]


def worst_difference(
    form: str, ranks: int, positions: Tensor, told: Tensor, masked: bool, kv_heads: int, scores: str = "plain"
) -> float:
    """Split against whole over output and gradients, each as a share of its tensor's largest number.

    `positions` are this rank's data, `told` is what it says they are.
    """
    tensors, numbers = projections(kv_heads), documents() if masked else None
    part = [tensor[:, :, positions] for tensor in tensors]
    split = attend(laid(form, ranks, scores), part, None if numbers is None else numbers[:, positions], told)
    whole = attend(model(scores), tensors, numbers, torch.arange(LENGTH))
    return max(
        ((ours - theirs[:, :, positions]).abs().max() / theirs.abs().max()).item()
        for ours, theirs in zip(split, whole)
    )


def compare(forms: tuple[str, ...]) -> dict[str, float]:
    world = start_world(60, "cpu")
    positions = context_positions(LENGTH, world.size, world.rank)
    return {
        f"{form}, {scores}, documents {masked}, kv heads {kv_heads}": worst_difference(
            form, world.size, positions, positions, masked, kv_heads, scores
        )
        for form in forms
        for scores in SCORES
        for masked in (False, True)
        for kv_heads in (HEADS, 4, 1)
        if form == "all_gather" or kv_heads % world.size == 0
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_attention_is_whole_attention(ranks: int) -> None:
    """Output, dQ, dK and dV of both forms are one process's within 2e-6: causal, with documents, with GQA,
    with ALiBi, with capped scores in a window."""
    for rank, differences in enumerate(run_ranks(compare, ranks, FORMS)):
        assert len(differences) == 30
        assert {case: worst for case, worst in differences.items() if not worst <= 2e-6} == {}, f"rank {rank}"


def compare_compiled() -> dict[str, float]:
    """Compiled against uncompiled, of each form: the worst share of output, dQ, dK and dV."""
    world = start_world(60, "cpu")
    positions = context_positions(LENGTH, world.size, world.rank)
    part = [tensor[:, :, positions] for tensor in projections(4)]
    worst = {}
    for form in FORMS:
        split = laid(form, world.size)
        plain = attend(split, part, None, positions)
        inner = split.layers["0"].attention.inner
        inner.forward = torch.compile(inner.forward, backend="aot_eager")
        compiled = attend(split, part, None, positions)
        worst[form] = max(
            ((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in zip(compiled, plain)
        )
    return worst


def test_compiled_attention_has_the_gradients_of_uncompiled() -> None:
    """torch 2.11 gave the exchange of Ulysses a gradient of 0, without an error."""
    for differences in run_ranks(compare_compiled, 2):
        assert max(differences.values()) <= 2e-6, differences


def dropped_and_split() -> dict[str, float]:
    """The worst difference of this rank's output and gradients from one process's, of an encoder."""
    world = start_world(60, "cpu")
    positions = context_positions(LENGTH, world.size, world.rank)
    maker, keys = NoiseMaker(1, HEADS), torch.tensor([[11, 12], [21, 22]], dtype=torch.int32)
    maker.weight_rate = 0.3

    def attended(
        of: nn.Module, part: list[Tensor], documents_bs: Tensor | None, places: Tensor
    ) -> list[Tensor]:
        q, k, v = (tensor.detach().clone().requires_grad_() for tensor in part[:3])
        inner = of.layers["0"].attention.inner
        mask = of.make_masks(documents_bs, places, len(places), places.device)[None]
        out = inner(q, k, v, mask, maker(keys, places, LENGTH).of_layer(0).weights)
        out.backward(part[3])
        return [out.detach(), q.grad, k.grad, v.grad]

    tensors, worst = projections(HEADS), {}
    for form in FORMS:
        for numbers in (None, documents() - 1):  # of which one in each sequence is causal
            of_part = None if numbers is None else numbers[:, positions]
            part = [tensor[:, :, positions] for tensor in tensors]
            split = attended(laid(form, world.size, "encoder"), part, of_part, positions)
            whole = attended(model("encoder"), tensors, numbers, torch.arange(LENGTH))
            pairs = zip(split, whole, strict=True)
            differences = [(a - b[:, :, positions]).abs().max().item() for a, b in pairs]
            worst[f"{form}, documents {numbers is not None}"] = max(differences)
    return worst


def test_an_encoders_ranks_drop_the_weights_of_one_process() -> None:
    """Output and gradients within 2e-6, to both sides, with and without documents."""
    for rank, worst in enumerate(run_ranks(dropped_and_split, 2)):
        assert len(worst) == 4 and max(worst.values()) <= 2e-6, (rank, worst)


class LargestBooleans(TorchDispatchMode):
    """Notes how many entries the largest boolean tensor has: a mask of queries and keys."""

    largest = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.bool:
            self.largest = max(self.largest, result.numel())
        return result


def plain_and_masked(policy: str, is_compiled: bool) -> tuple[float, int, int]:
    """(worst difference from one process, the largest mask without documents, with documents)."""
    world = start_world(60, "cpu")
    positions = context_positions(LENGTH, world.size, world.rank)
    tensors = projections(4)
    part = [tensor[:, :, positions] for tensor in tensors]
    whole = attend(model(), tensors, None, torch.arange(LENGTH))
    split = laid("all_gather", world.size)
    apply_recompute(split, Layout(recompute=policy))
    with LargestBooleans() as plain:
        found = attend(split, part, None, positions)
    with LargestBooleans() as masked:
        attend(split, part, documents()[:, positions], positions)
    if is_compiled:
        inner = split.layers["0"].attention.inner
        inner.forward = torch.compile(inner.forward, backend="aot_eager", fullgraph=True, dynamic=False)
        found = attend(split, part, None, positions)
    worst = max((mine - its[:, :, positions]).abs().max().item() for mine, its in zip(found, whole))
    return worst, plain.largest, masked.largest


@pytest.mark.parametrize(
    ("policy", "is_compiled"),
    [
        ("none", False),
        *(pytest.param(policy, True, marks=pytest.mark.full) for policy in ("none", "attention")),
    ],
)
def test_gathered_attention_without_documents_makes_no_mask(policy: str, is_compiled: bool) -> None:
    """No [q, n] tensor, and the numbers of one process; the counter sees the mask of documents."""
    for worst, plain, masked in run_ranks(plain_and_masked, 2, policy, is_compiled):
        assert worst <= 5e-6
        assert plain <= LENGTH < LENGTH * LENGTH // 4 <= masked


def compare_bf16(form: str) -> tuple[bool, float, int]:
    """(the same bits twice, worst difference from fp32, products of queries and keys)."""
    world = start_world(60, "cpu")
    positions = context_positions(LENGTH, world.size, world.rank)
    part = [tensor[:, :, positions] for tensor in projections(4, torch.bfloat16)]
    split, numbers = laid(form, world.size), documents()
    products, kernel = [], F.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, v: Tensor, **settings: object) -> Tensor:
        products.append(q.shape[1] * q.shape[2] * k.shape[2])
        return kernel(q, k, v, **settings)

    F.scaled_dot_product_attention = counted
    runs = [attend(split, part, numbers[:, positions], positions) for _ in range(2)]
    F.scaled_dot_product_attention = kernel
    same = all(torch.equal(first, second) for first, second in zip(*runs))
    exact = attend(
        model(), [x.float() for x in projections(4, torch.bfloat16)], numbers, torch.arange(LENGTH)
    )
    worst = max((ours - theirs[:, :, positions]).abs().max().item() for ours, theirs in zip(runs[0], exact))
    return same, worst, sum(products) // 2


@pytest.mark.parametrize("form", FORMS)
def test_bf16_repeats_bit_by_bit_with_equal_work(form: str) -> None:
    """bf16 goes over gloo both ways within its rounding, twice the same bits,
    and every rank computes as much.
    """
    same, worst, products = zip(*run_ranks(compare_bf16, 4, form))
    assert all(same)
    assert max(worst) < 0.05
    assert len(set(products)) == 1
    # All gather leaves out what lies behind each block: (2c + 1) / 4c of all products, in all.
    whole = HEADS * LENGTH * LENGTH
    assert sum(products) == (whole * 9 // 16 if form == "all_gather" else whole)


def contiguous(length: int, ranks: int, rank: int) -> Tensor:
    return torch.arange(length).chunk(ranks)[rank]


def plant_wrong_order(form: str) -> tuple[float, str]:
    """Data in contiguous parts: once called balanced, once by their true positions."""
    world = start_world(60, "cpu")
    wrong = contiguous(LENGTH, world.size, world.rank)
    right = context_positions(LENGTH, world.size, world.rank)
    unnoticed = worst_difference(form, world.size, wrong, right, masked=False, kv_heads=4)
    try:
        worst_difference(form, world.size, wrong, wrong, masked=False, kv_heads=4)
    except ValueError as error:
        return unnoticed, str(error)
    return unnoticed, ""


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_order_of_positions_is_caught(form: str) -> None:
    """Mutation: contiguous parts break the equality above, and positions that own up to it are refused."""
    for unnoticed, refusal in run_ranks(plant_wrong_order, 2, form):
        assert unnoticed > 1e-2
        assert "positions_s are not context_positions(32, 2, " in refusal


def spread_of_work(split, ranks: int) -> int:
    """Allowed (query, key) pairs of the busiest rank less those of the idlest."""
    pairs = [int((split(LENGTH, ranks, rank) + 1).sum()) for rank in range(ranks)]
    return max(pairs) - min(pairs)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_positions_are_a_balanced_partition(ranks: int) -> None:
    """Every position on one rank, causal pairs equal on all (contiguous parts are not),
    and back to the sequence.
    """
    parts = [context_positions(LENGTH, ranks, rank) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(LENGTH))
    assert {part.numel() for part in parts} == {LENGTH // ranks}
    assert spread_of_work(context_positions, ranks) == 0
    assert ranks == 1 or spread_of_work(contiguous, ranks) > LENGTH // (2 * ranks)
    if ranks > 1:
        assert torch.equal(in_sequence_order(parts, dim=0), torch.arange(LENGTH))
        assert torch.equal(in_rank_order(torch.arange(LENGTH), ranks, dim=0), torch.stack(parts))


def test_lengths_that_do_not_split_are_refused() -> None:
    """The message names lengths that work, and they do; one rank takes any length and changes no module."""
    with pytest.raises(KieloError, match="sequence_length of 24 or 32"):
        context_positions(30, 4, 0)
    assert [context_positions(length, 4, 3).numel() for length in (24, 32)] == [6, 8]
    assert context_positions(31, 1, 0).numel() == 31
    untouched = model()
    apply_context_parallel(untouched, {}, SimpleNamespace(context=1, context_attention="ulysses"))
    assert type(untouched.make_masks) is MaskMaker
    assert type(untouched.layers["0"].attention.inner) is InnerAttention
