"""The chunked loss against plain cross-entropy on full logits,
and over ranks against itself on one process.
"""

import os
import shutil

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kielo.ranks.world import start_world
from kielo.resolve.software import BACKEND_VARIABLE
from kielo.train.loss import LossOptions, chunked_loss
from tests.started_ranks import run_ranks


def plain_loss(hidden, weight, labels, divisor, z_loss):
    logits = (hidden.flatten(0, -2) @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32))
    labels = labels.flatten()
    log_z = torch.logsumexp(logits, dim=-1)[labels != -100]
    return (F.cross_entropy(logits, labels, reduction="sum") + z_loss * log_z.square().sum()) / divisor


NEEDS_COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.full, NEEDS_COMPILER])]
)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_compiled_is_the_same(
    dtype: torch.dtype, tolerance: float, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused in fp32 it differs in the order of sums, in bf16 by one rounding of a logit's gradient too.

    (Machine code, which takes most of the time, is made in tests/parallel/test_compile.py.)
    """
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    arguments = tensors(dtype, vocabulary=64, vocab_size=50)
    outcomes = []
    for compiles in (False, True):
        loss = chunked_loss(*arguments, LossOptions(1e-3, 16, vocab_size=50, compiles=compiles))
        outcomes.append((loss, *torch.autograd.grad(loss, arguments[:2])))
    for plain, compiled in zip(*outcomes, strict=True):
        torch.testing.assert_close(compiled, plain, atol=tolerance, rtol=tolerance)


def compiled_graphs(group: dist.ProcessGroup | None = None) -> tuple[list[int], bool]:
    """(the number of graphs that were compiled after each number of tokens, were loss and gradients those
    of code that is made for the number alone)
    """
    torch._dynamo.reset()
    counters.clear()
    hidden, weight, labels, divisor = tensors(vocabulary=64)
    rows = weight if group is None else rows_of_rank(weight)[0]
    graphs, are_same = [], []
    for varies, tokens in ((True, 16), (True, 38), (True, 23), (True, 9), (False, 9)):
        options = LossOptions(1e-3, 16, group, compiles=True, varies=varies)
        given = hidden.flatten(0, 1)[:tokens].detach().requires_grad_()
        if not varies:
            torch._dynamo.reset()
        loss = chunked_loss(given, rows, labels.flatten()[:tokens], divisor, options)
        are_same.append((loss.detach(), *torch.autograd.grad(loss, (given, rows))))
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs[:-1], all(map(torch.equal, *are_same[-2:]))


def compiled_graphs_on_ranks() -> tuple[list[int], bool]:
    os.environ[BACKEND_VARIABLE] = "aot_eager"  # of this rank's process only
    start_world(60, "cpu")
    return compiled_graphs(dist.group.WORLD)


def test_another_number_of_tokens_compiles_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph on one rank, two over ranks, both made at the first call, with the same numbers to the bit."""
    monkeypatch.setenv(BACKEND_VARIABLE, "aot_eager")
    assert compiled_graphs() == ([1, 1, 1, 1], True)
    for rank in run_ranks(compiled_graphs_on_ranks, 2):
        assert rank == ([2, 2, 2, 2], True)


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that operators make while it is on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen.extend(leaf.shape for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        return out


def tensors(dtype=torch.float32, vocabulary=50, vocab_size=None):
    """vocab_size: labels are below it, and rows beyond are padding that holds anything."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 19, 16, generator=generator).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(vocabulary, 16, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab_size or vocabulary, (2, 19), generator=generator)
    labels[0, 3:9] = -100
    labels[1] = torch.where(torch.arange(19) < 17, labels[1], -100)
    return hidden, weight, labels, torch.tensor(30.0)


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_equals_plain_cross_entropy(z_loss: float, chunk_tokens: int) -> None:
    """Loss and both gradients equal the unchunked formula to 1e-6,
    for chunks that divide the tokens or do not.
    """
    hidden, weight, labels, divisor = tensors()
    loss = chunked_loss(hidden, weight, labels, divisor, LossOptions(z_loss, chunk_tokens))
    ours = torch.autograd.grad(3 * loss, (hidden, weight))
    expected_loss = plain_loss(hidden, weight, labels, divisor, z_loss)
    expected = torch.autograd.grad(3 * expected_loss, (hidden, weight))
    torch.testing.assert_close(loss, expected_loss, atol=1e-6, rtol=1e-6)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_bias_of_the_head_is_added_to_the_logits(softcap: float | None) -> None:
    """Loss and all three gradients equal torch's own to 1e-6 with a bias, also of a frozen head."""
    hidden, weight, labels, divisor = tensors()
    bias = torch.linspace(-1, 1, len(weight)).requires_grad_()
    logits = hidden @ weight.t() + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / divisor
    options = LossOptions(0.0, 7, softcap=softcap)
    loss = chunked_loss(hidden, weight, labels, divisor, options, bias)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    pairs = zip(*(torch.autograd.grad(2 * one, (hidden, weight, bias)) for one in (loss, expected)))
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
    frozen = chunked_loss(hidden.detach(), weight.detach(), labels, divisor, options, bias)
    torch.testing.assert_close(frozen, loss)
    assert torch.autograd.grad(frozen, bias)[0].abs().max() > 1e-3


def test_a_bias_gradient_of_bf16_is_summed_in_fp32() -> None:
    """Four equal logits, 517 tokens of one label in each of four chunks: a chunk sums to 129.25 and -387.75,
    which bf16 would round, and those of all chunks exactly 0.
    """
    hidden, weight = torch.zeros(4 * 517, 2).bfloat16(), torch.ones(4, 2).bfloat16()
    bias = torch.zeros(4).bfloat16().requires_grad_()
    labels, one = torch.arange(4).repeat_interleave(517), torch.tensor(1.0)
    loss = chunked_loss(hidden, weight, labels, one, LossOptions(0.0, 517), bias)
    assert torch.autograd.grad(loss, bias)[0].tolist() == [0.0] * 4
    loss = chunked_loss(hidden[:517], weight, labels[:517], one, LossOptions(0.0, 517), bias)
    (gradient,) = torch.autograd.grad(loss, bias)
    assert gradient.dtype == torch.bfloat16 and gradient.tolist() == [-388.0, 129.0, 129.0, 129.0]


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)], ids=str)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_loss_and_gradients_are_fp64s(dtype, tolerance, chunk_tokens, device) -> None:
    """Loss (always fp32) and gradients (in their inputs' precision) by norm beside fp64 from the same inputs.

    fp32: some ten roundings of 2⁻²⁴. bf16: logits, their gradients and the results are rounded, 2⁻⁹ each. The
    weight's gradient is summed over 38 chunks as well as over one: in fp32, in the product itself on CUDA.
    """
    hidden, weight, labels, divisor = tensors(dtype)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    truth = plain_loss(*wide, labels, divisor, 1e-3)
    given = [hidden, weight, labels, divisor]
    loss = chunked_loss(*(tensor.to(device) for tensor in given), LossOptions(1e-3, chunk_tokens))
    assert loss.dtype == torch.float32
    gradients = torch.autograd.grad(3 * loss, given[:2])
    for mine, theirs in zip(gradients, torch.autograd.grad(3 * truth, wide), strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - theirs).norm() / theirs.norm() < tolerance
    assert abs(loss.item() / truth.item() - 1) < tolerance


def test_full_logits_never_exist() -> None:
    """No tensor made on the way is larger than a chunk's logits or the weight's gradient."""
    hidden, weight, labels = torch.randn(400, 8), torch.randn(50, 8), torch.randint(0, 50, (400,))
    hidden.requires_grad_()
    weight.requires_grad_()
    with Shapes() as shapes:
        chunked_loss(hidden, weight, labels, torch.tensor(400.0), LossOptions(0.0, 16)).backward()
    assert max(shape.numel() for shape in shapes.seen) <= max(16 * 50, hidden.numel()) < 400 * 50


def test_without_gradients_and_without_labels() -> None:
    """The same loss comes out under no_grad; a batch with nothing to count gives 0 and zero
    gradients, not NaN.
    """
    hidden, weight, labels, divisor = tensors()
    with torch.no_grad():
        silent = chunked_loss(hidden, weight, labels, divisor, LossOptions(0.0, 5))
    torch.testing.assert_close(
        silent, chunked_loss(hidden, weight, labels, divisor, LossOptions(0.0, 5)).detach()
    )
    empty = chunked_loss(hidden, weight, torch.full_like(labels, -100), divisor)
    empty.backward()
    assert empty == 0 and weight.grad.abs().max() == 0 and hidden.grad.abs().max() == 0


def without_padding(weight, vocab_size):
    return weight.detach()[:vocab_size].clone().requires_grad_()


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_rows_are_as_if_they_were_not_there(dtype: torch.dtype, z_loss: float) -> None:
    """67 tokens in 128 rows: loss and gradients are those of 67 rows, padding's exactly 0, whatever its rows
    hold; with a frozen head and under no_grad too. A label that is padding makes the loss infinite.
    """
    hidden, weight, labels, divisor = tensors(dtype, 128, 67)
    loss, hidden_gradient, weight_gradient = loss_and_gradients(
        hidden, weight, labels, divisor, z_loss, 7, vocab_size=67
    )
    alone = without_padding(weight, 67)
    expected = loss_and_gradients(hidden, alone, labels, divisor, z_loss, 7, vocab_size=67)
    torch.testing.assert_close(loss, expected[0], rtol=1e-7, atol=0)
    close = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-4}
    torch.testing.assert_close(hidden_gradient, expected[1], **close)
    torch.testing.assert_close(weight_gradient[:67], expected[2], **close)
    assert weight_gradient[:67].any() and not weight_gradient[67:].any()
    options = LossOptions(z_loss, 7, vocab_size=67)
    frozen = chunked_loss(hidden, weight.detach(), labels, divisor, options)
    assert torch.equal(torch.autograd.grad(3 * frozen, hidden)[0], hidden_gradient)
    labels[0, 0] = 67
    with torch.no_grad():
        assert chunked_loss(hidden, weight, labels, divisor, options) == float("inf")


def capped_loss(hidden, weight, labels, divisor, z_loss, softcap):
    """Autograd's own, with the formula written out."""
    logits = (hidden.flatten(0, -2) @ weight.t()).float()
    logits = softcap * torch.tanh(logits / softcap)
    labels = labels.flatten()
    log_z = torch.logsumexp(logits, dim=-1)[labels != -100]
    loss = (F.cross_entropy(logits, labels, reduction="sum") + z_loss * log_z.square().sum()) / divisor
    return loss.detach(), *torch.autograd.grad(3 * loss, (hidden, weight))


def capped_over_ranks(softcap, compiles):
    os.environ[BACKEND_VARIABLE] = "aot_eager"  # of this rank's process only
    start_world(60, "cpu")
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, labels, divisor = tensors(dtype, 48, 41)
        rows, _ = rows_of_rank(weight)
        options = LossOptions(1e-2, 19, dist.group.WORLD, 41, softcap, compiles=compiles)
        loss = chunked_loss(hidden, rows, labels, divisor, options)
        results[dtype] = loss.detach(), *torch.autograd.grad(3 * loss, (hidden, rows))
    return results


@pytest.mark.parametrize(("softcap", "compiles"), [(0.5, False), (30.0, True)])
def test_capped_logits_are_plain_autograds(softcap: float, compiles: bool) -> None:
    """A cap that bends most logits, or hardly one, on one process and over two ranks (there compiled, too),
    with z-loss and padding: loss and gradients are those of plain autograd to 1e-6, in bf16 to its rounding,
    and padding's gradient is exactly 0.
    """
    ranks = run_ranks(capped_over_ranks, 2, softcap, compiles)
    for dtype, close in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        hidden, weight, labels, divisor = tensors(dtype, 48, 41)
        truth = capped_loss(
            hidden.float(), without_padding(weight, 41).float(), labels, divisor, 1e-2, softcap
        )
        loss = chunked_loss(hidden, weight, labels, divisor, LossOptions(1e-2, 7, None, 41, softcap))
        one = loss.detach(), *torch.autograd.grad(3 * loss, (hidden, weight))
        losses, hidden_gradients, row_gradients = zip(*(rank[dtype] for rank in ranks), strict=True)
        two = losses[0], sum(part.float() for part in hidden_gradients), torch.cat(row_gradients)
        for ours in (one, two):
            assert not ours[2][41:].any()
            for mine, theirs in zip((ours[0], ours[1], ours[2][:41]), truth, strict=True):
                assert (mine.float() - theirs).norm() / theirs.norm() < close
        with torch.no_grad():
            assert torch.equal(
                chunked_loss(hidden, weight, labels, divisor, LossOptions(1e-2, 7, None, 41, softcap)), one[0]
            )


CASES = [(0.0, 1), (0.0, 7), (1e-2, 7), (1e-2, 64)]  # (z_loss, chunk_tokens); there are 38 tokens


def loss_and_gradients(hidden, weight, labels, divisor, z_loss, chunk_tokens, group=None, vocab_size=None):
    loss = chunked_loss(hidden, weight, labels, divisor, LossOptions(z_loss, chunk_tokens, group, vocab_size))
    return loss.detach(), *torch.autograd.grad(3 * loss, (hidden, weight))


def rows_of_rank(weight):
    """(this rank's rows as a plain leaf, the same rows as a DTensor leaf)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    laid_out = distribute_tensor(weight.detach(), mesh, [Shard(0)])
    return laid_out.to_local().clone().requires_grad_(), laid_out.requires_grad_()


def parallel_losses(vocab_size):
    """{(dtype, case): (loss, this rank's part of hidden's gradient, its rows' gradient)}, DTensor or not."""
    start_world(60, "cpu")
    group = dist.group.WORLD
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, labels, divisor = tensors(dtype, 48, vocab_size)
        rows, laid_out = rows_of_rank(weight)
        for case in CASES:
            plain = loss_and_gradients(hidden, rows, labels, divisor, *case, group, vocab_size)
            loss, hidden_gradient, weight_gradient = loss_and_gradients(
                hidden, laid_out, labels, divisor, *case, group, vocab_size
            )
            assert isinstance(weight_gradient, DTensor) and weight_gradient.placements == (Shard(0),)
            for one, other in zip(plain, (loss, hidden_gradient, weight_gradient.to_local()), strict=True):
                assert torch.equal(one, other)
            with torch.no_grad():
                assert torch.equal(
                    chunked_loss(hidden, laid_out, labels, divisor, LossOptions(*case, group, vocab_size)),
                    loss,
                )
            results[dtype, case] = plain
    return results


@pytest.mark.parametrize(("num_ranks", "vocab_size"), [(2, 48), (2, 41), (4, 29)])
def test_vocabulary_over_ranks_equals_one_process(num_ranks: int, vocab_size: int) -> None:
    """The loss on 2 and 4 ranks (the same bits on each), hidden's gradient (summed over the ranks) and the
    rows' gradients are those of one process to 1e-6, with z-loss and ignored labels; in bf16 to its rounding.
    Some of 48 rows may be padding (41 tokens), on one of 4 ranks all of them (29 tokens): as if they were not
    there.
    """
    ranks = run_ranks(parallel_losses, num_ranks, vocab_size)
    for dtype, case in ranks[0]:
        losses, hidden_gradients, row_gradients = zip(*(rank[dtype, case] for rank in ranks), strict=True)
        assert len({loss.item() for loss in losses}) == 1
        assert {gradient.dtype for gradient in (*hidden_gradients, *row_gradients)} == {dtype}
        rows, padding = torch.cat(row_gradients).float().split([vocab_size, 48 - vocab_size])
        assert not padding.any()
        ours = losses[0], sum(part.float() for part in hidden_gradients), rows
        hidden, weight, labels, divisor = tensors(dtype, 48, vocab_size)
        expected = loss_and_gradients(hidden, without_padding(weight, vocab_size), labels, divisor, *case)
        for mine, theirs in zip(ours, expected, strict=True):
            difference = (mine - theirs.float()).norm() / theirs.float().norm()
            assert difference < (1e-6 if dtype == torch.float32 else 1e-2)
        torch.testing.assert_close(losses[0], expected[0], rtol=1e-6, atol=0)


def parallel_corners():
    """Computes the cases of the next test, on one rank of two."""
    start_world(60, "cpu")
    group = dist.group.WORLD
    hidden, weight, labels, divisor = tensors(vocabulary=48)
    rows, laid_out = rows_of_rank(weight)
    with Shapes() as shapes:
        loss = chunked_loss(hidden, rows, labels, divisor, LossOptions(1e-3, 7, group))
        (3 * loss).backward()
    stray = labels.clone()
    stray[0, 0] = 48
    with pytest.raises(
        ValueError, match=r"The loss over 2 rank\(s\) of the tensor axis takes Shard\(0\) on a"
    ):
        chunked_loss(
            hidden,
            laid_out.detach().redistribute(placements=[Replicate()]),
            labels,
            divisor,
            LossOptions(group=group),
        )
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    return {
        "lengths": {length for shape in shapes.seen for length in shape},
        "sizes": max(shape.numel() for shape in shapes.seen),
        "nothing counted": loss_and_gradients(
            hidden, rows, torch.full_like(labels, -100), divisor, 1e-3, 7, group
        ),
        "frozen head": torch.autograd.grad(
            chunked_loss(hidden, rows.detach(), labels, divisor, LossOptions(1e-3, 7, group)), hidden
        )[0],
        "hidden": hidden.grad / 3,
        "stray label": chunked_loss(hidden, rows, stray, divisor, LossOptions(0.0, 7, group)).item(),
        "padding as label": chunked_loss(
            hidden, rows, labels, divisor, LossOptions(1e-3, 7, group, 20)
        ).item(),
        "alone": loss_and_gradients(hidden, weight, labels, divisor, 1e-3, 7, alone),
    }


def test_corners_over_ranks() -> None:
    """No tensor is as wide as the vocabulary nor has all tokens' logits; nothing counted gives 0, not NaN; a
    frozen head leaves hidden's gradient as it is; a label outside the vocabulary is loud; a group of one rank
    is one process to the bit.
    """
    hidden, weight, labels, divisor = tensors(vocabulary=48)
    for found in run_ranks(parallel_corners, 2):
        assert 24 in found["lengths"] and 48 not in found["lengths"]
        assert found["sizes"] <= hidden.numel() < 38 * 24
        assert all(torch.count_nonzero(part) == 0 for part in found["nothing counted"])
        torch.testing.assert_close(found["frozen head"], found["hidden"], rtol=1e-6, atol=1e-9)
        assert found["stray label"] == found["padding as label"] == float("inf")
        expected = loss_and_gradients(hidden, weight, labels, divisor, 1e-3, 7)
        assert all(torch.equal(one, other) for one, other in zip(found["alone"], expected, strict=True))
