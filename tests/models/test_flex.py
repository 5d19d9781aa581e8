"""FlexAttention gives what the dense code gives: outputs on the CPU, and on a GPU gradients too."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from kielo.dataset.batches import causal_documents
from kielo.models import families
from kielo.models.blocks import alibi, flex
from kielo.models.blocks.alibi import Alibi
from kielo.models.blocks.attention import InnerAttention, MaskMaker
from kielo.parallel.compile import apply_compile
from kielo.parallel.context_parallel import context_positions
from kielo.train.precision import settle_matrix_products
from tests.models.equality import batch, mean_loss, our_logits, pair
from tests.models.tiny_configs import LENGTH as TINY_LENGTH
from tests.models.tiny_configs import TINY

# More than a block of 128, and no multiple of it.
BATCH, LENGTH, HEADS, HEAD_DIM, WINDOW = 2, 200, 4, 16, 37
SCORES = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "ALiBi": {"alibi": True},
    "cap": {"softcap": 1.5},
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def compiled_anew():
    """Beyond torch's limit of recompilations (8) the uncompiled form would run, unseen."""
    torch._dynamo.reset()


def documents() -> Tensor:
    """[b, s] int32: borders inside blocks and on a block's edge, one document over several blocks."""
    borders = ([3, 128, 150], [190, 191, 199])
    return torch.stack([(torch.arange(LENGTH)[:, None] >= torch.tensor(row)).sum(1) for row in borders]).int()


def projections(groups: int, head_dim: int = HEAD_DIM) -> list[Tensor]:
    """q, k, v and the output's gradient, [b, h or g, s, k], strided as a projection leaves them."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(BATCH, LENGTH, heads, head_dim, generator=generator).transpose(1, 2)
        for heads in (HEADS, groups, groups, HEADS)
    ]


def parts(scores: str, window: int | None) -> tuple[MaskMaker, InnerAttention]:
    options = dict(SCORES[scores])
    has_alibi = options.pop("alibi", False)
    make_masks = MaskMaker([window], needs_distance=has_alibi, is_capped="softcap" in options)
    return make_masks, InnerAttention(**options, alibi=Alibi(HEADS) if has_alibi else None)


CASES = pytest.mark.parametrize("scores", SCORES)
WINDOWS = pytest.mark.parametrize("window", [None, WINDOW], ids=["all", "window"])
DOCUMENTS = pytest.mark.parametrize("is_masked", [False, True], ids=["one text", "documents"])


@CASES
@WINDOWS
@DOCUMENTS
def test_outputs_are_the_dense_ones(scores: str, window: int | None, is_masked: bool) -> None:
    """Within 2e-6 for all kinds of scores, with and without window and documents; plain causal attention gets
    no blocks at all.
    """
    assert_outputs_are_the_dense_ones(scores, window, is_masked, 4, 16)


@CASES
@pytest.mark.parametrize(("groups", "head_dim"), [(2, 16), (1, 8)])
def test_outputs_of_shared_key_heads_are_the_dense_ones(scores: str, groups: int, head_dim: int) -> None:
    """Within 2e-6, of small heads too."""
    assert_outputs_are_the_dense_ones(scores, WINDOW, True, groups, head_dim)


def assert_outputs_are_the_dense_ones(
    scores: str, window: int | None, is_masked: bool, groups: int, head_dim: int
) -> None:
    make_masks, inner = parts(scores, window)
    numbers, cpu = documents() if is_masked else None, torch.device("cpu")
    *inputs, _ = projections(groups, head_dim)
    in_blocks = make_masks.in_blocks(numbers, LENGTH, cpu)[window]
    needs_blocks = is_masked or window is not None or scores in ("ALiBi", "cap")
    assert (in_blocks.blocks is not None) == needs_blocks and in_blocks.visible is None
    dense = make_masks(numbers, None, LENGTH, cpu)[window]
    assert dense.blocks is None, "the CPU keeps the dense reference"
    with torch.no_grad():
        torch.testing.assert_close(inner(*inputs, in_blocks), inner(*inputs, dense), atol=2e-6, rtol=0)


@DOCUMENTS
def test_alibi_by_a_tensor_of_biases_is_the_same_attention(is_masked: bool) -> None:
    """Within 2e-6 of FlexAttention, with the dense code's gradients, and no tensor of s² is kept."""
    make_masks, inner = parts("ALiBi", None)
    numbers, cpu = documents() if is_masked else None, torch.device("cpu")
    *inputs, gradient = projections(HEADS)
    with torch.no_grad():
        expected = inner(*inputs, make_masks.in_blocks(numbers, LENGTH, cpu)[None])
    make_masks.is_dense = True
    assert make_masks(None, None, LENGTH, torch.device("meta"))[None].blocks is None
    mask = make_masks(numbers, None, LENGTH, cpu)[None]
    seen, kept, gradients = (mask.distance, mask.visible), [], []
    for attend in (alibi.attend, alibi.attend_again):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        with saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor):
            out = attend(*leaves, inner.alibi.slopes, seen)
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)
        gradients.append(torch.autograd.grad(out, leaves, gradient))
    # A mask of all heads, which layers share, is the largest; biases have HEADS times its size.
    assert max(kept) <= BATCH * LENGTH**2 < HEADS * LENGTH**2
    torch.testing.assert_close(*gradients, atol=5e-6, rtol=0)


@WINDOWS
@pytest.mark.parametrize("kind", ["one text", "documents", "causal"])
def test_encoders_see_both_sides(window: int | None, kind: str) -> None:
    """Blocks, the dense code and a plain softmax over |distance| < window agree within 2e-6; without window
    and documents neither has a mask. Queries of a causal sequence see no later keys.
    """
    make_masks, inner = MaskMaker([window], is_causal=False), InnerAttention()
    numbers, cpu = None if kind == "one text" else documents(), torch.device("cpu")
    q, k, v, _ = projections(groups=2)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = (distance.abs() < (window or LENGTH)).expand(BATCH, 1, -1, -1)
    if numbers is not None:
        seen = seen & (numbers[:, None, :, None] == numbers[:, None, None, :])
    if kind == "causal":
        numbers[0] = causal_documents(numbers[0])
        seen[0] &= distance >= 0
    scores = (q @ k.repeat_interleave(2, dim=1).mT / HEAD_DIM**0.5).masked_fill(~seen, -torch.inf)
    expected = scores.softmax(-1) @ v.repeat_interleave(2, dim=1)
    in_blocks = make_masks.in_blocks(numbers, LENGTH, cpu)[window]
    dense = make_masks(numbers, None, LENGTH, cpu)[window]
    assert (in_blocks.blocks is None) == (dense.visible is None) == (window is None and numbers is None)
    with torch.no_grad():
        for mask in (in_blocks, dense):
            torch.testing.assert_close(inner(q, k, v, mask), expected, atol=2e-6, rtol=0)


@CASES
@DOCUMENTS
def test_queries_at_other_positions_are_those_of_the_whole(scores: str, is_masked: bool) -> None:
    """A context rank's two blocks against all keys: rows of the whole sequence's output."""
    make_masks, inner = parts(scores, WINDOW)
    numbers, cpu, positions = (
        documents() if is_masked else None,
        torch.device("cpu"),
        context_positions(200, 2, 1),
    )
    q, k, v, _ = projections(groups=2)
    dense = make_masks(numbers, None, LENGTH, cpu)[WINDOW]
    in_blocks = make_masks.in_blocks(numbers, LENGTH, cpu, positions)[WINDOW]
    with torch.no_grad():
        found, whole = inner(q[:, :, positions], k, v, in_blocks), inner(q, k, v, dense)
    torch.testing.assert_close(found, whole[:, :, positions], atol=2e-6, rtol=0)


@pytest.mark.parametrize("scores", ["plain", "ALiBi", "cap"])
def test_a_compiled_layer_takes_each_new_mask_as_it_is(compiled_anew, scores: str) -> None:
    """One graph for the masks of three batches, whole (no break), within 2e-6 of the dense code."""
    counters.clear()
    make_masks, inner = parts(scores, WINDOW)
    cpu, compiled = torch.device("cpu"), torch.compile(inner.forward, backend="eager", fullgraph=True)
    *inputs, _ = projections(groups=2)
    for shift in (0, 5, 20):
        numbers = (documents() >= 1 + shift // 10).int()
        in_blocks, dense = (
            make_masks.in_blocks(numbers, LENGTH, cpu)[WINDOW],
            make_masks(numbers, None, LENGTH, cpu)[WINDOW],
        )
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs, in_blocks), inner(*inputs, dense), atol=2e-6, rtol=0)
    assert counters["stats"]["unique_graphs"] == 1


def test_inside_compiled_code_the_kernel_is_not_compiled_by_itself() -> None:
    gpu = torch.device("cuda")

    def is_itself() -> bool:
        return flex.compiled_on(gpu, flex.flex_attention) is flex.flex_attention

    inside = torch.compile(lambda x: x + is_itself(), backend="eager", fullgraph=True)
    assert not is_itself() and inside(torch.zeros(1)) == 1


def with_gradients(
    scores: str, window: int | None, is_masked: bool, device: str, dtype: torch.dtype
) -> list[Tensor]:
    """[output, dq, dk, dv] in fp32 on the CPU, by what `MaskMaker` chooses for the device."""
    make_masks, inner = parts(scores, window)
    if inner.alibi is not None:
        inner.alibi.reset_buffers(device)
    numbers = documents().to(device) if is_masked else None
    *inputs, gradient = (tensor.to(device, dtype) for tensor in projections(groups=2))
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    out = inner(*inputs, make_masks(numbers, None, LENGTH, torch.device(device))[window])
    out.backward(gradient)
    return [tensor.detach().float().cpu() for tensor in (out, *(tensor.grad for tensor in inputs))]


@pytest.mark.gpu
@needs_gpu
@CASES
@WINDOWS
@DOCUMENTS
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_a_gpu_gives_outputs_and_gradients_of_the_dense_reference(
    compiled_anew, scores, window, is_masked, dtype, tolerance
) -> None:
    """The relative L2 distance from fp32 on the CPU is small. fp32: sums in another order;
    bf16: 8 bits of mantissa.
    """
    settle_matrix_products("fp32")
    truth = with_gradients(scores, window, is_masked, "cpu", torch.float32)
    for ours, theirs in zip(with_gradients(scores, window, is_masked, "cuda", dtype), truth):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("variant", ["mistral", "gemma2", "bloom", "gpt2"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["uncompiled", "compiled"])
def test_models_on_a_gpu_are_those_on_the_cpu(
    compiled_anew, variant: str, is_compiled: bool, tmp_path
) -> None:
    """Loss within 1e-5 and gradients within 1e-4 in relative L2, inside documents:
    windows, caps and slopes together.
    """
    settle_matrix_products("fp32")
    ours, _ = pair(TINY[variant], tmp_path)
    inputs, labels = batch()
    numbers = (torch.arange(TINY_LENGTH) >= 10).int().expand(3, -1)
    loss = mean_loss(our_logits(ours, inputs, numbers), labels)
    loss.backward()
    there = families.build_model(ours.config)
    there.load_state_dict(ours.state_dict())
    there.to("cuda")
    if is_compiled:
        apply_compile(there)
    loss_there = mean_loss(our_logits(there, inputs.cuda(), numbers.cuda()), labels.cuda())
    loss_there.backward()
    assert abs(loss_there.item() / loss.item() - 1) <= 1e-5
    for (name, one), other in zip(ours.named_parameters(), there.parameters()):
        assert (other.grad.cpu() - one.grad).norm() <= 1e-4 * one.grad.norm() + 1e-6, name
