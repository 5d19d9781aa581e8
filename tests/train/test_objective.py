"""The chunked loss against plain cross-entropy on full logits."""

import pytest
import torch
from torch.nn import functional as F

from kielo.train.objective import chunked_loss


def plain_loss(hidden, weight, labels, divisor, z_loss):
    logits = (hidden.flatten(0, -2) @ weight.t()).float()
    labels = labels.flatten()
    log_z = torch.logsumexp(logits, dim=-1)[labels != -100]
    return (F.cross_entropy(logits, labels, reduction="sum") + z_loss * log_z.square().sum()) / divisor


def tensors(dtype=torch.float32):
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 19, 16, generator=generator).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(50, 16, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(0, 50, (2, 19), generator=generator)
    labels[0, 3:9] = -100
    labels[1] = torch.where(torch.arange(19) < 17, labels[1], -100)
    return hidden, weight, labels, torch.tensor(30.0)


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_equals_plain_cross_entropy(z_loss: float, chunk_tokens: int) -> None:
    """Loss and both gradients equal the unchunked formula to 1e-6, for chunks that divide the tokens or do not."""
    hidden, weight, labels, divisor = tensors()
    loss = chunked_loss(hidden, weight, labels, divisor, z_loss, chunk_tokens)
    ours = torch.autograd.grad(3 * loss, (hidden, weight))
    expected_loss = plain_loss(hidden, weight, labels, divisor, z_loss)
    expected = torch.autograd.grad(3 * expected_loss, (hidden, weight))
    torch.testing.assert_close(loss, expected_loss, atol=1e-6, rtol=1e-6)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def test_bf16_weight_keeps_fp32_loss_and_sums() -> None:
    """In bf16 the loss stays fp32 and the gradients stay within bf16's rounding of the fp32 ones."""
    hidden, weight, labels, divisor = tensors(torch.bfloat16)
    loss = chunked_loss(hidden, weight, labels, divisor, 1e-4, 7)
    loss.backward()
    assert loss.dtype == torch.float32 and weight.grad.dtype == hidden.grad.dtype == torch.bfloat16
    wide = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    expected = plain_loss(*wide, labels, divisor, 1e-4)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=0)
    for mine, theirs in ((hidden.grad, wide[0].grad), (weight.grad, wide[1].grad)):
        assert (mine.float() - theirs).norm() / theirs.norm() < 1e-2


def test_full_logits_never_exist() -> None:
    """No tensor made on the way is larger than a chunk's logits or the weight's gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
            return out

    hidden, weight, labels = torch.randn(400, 8), torch.randn(50, 8), torch.randint(0, 50, (400,))
    hidden.requires_grad_()
    weight.requires_grad_()
    with Sizes():
        chunked_loss(hidden, weight, labels, torch.tensor(400.0), 0.0, 16).backward()
    assert max(sizes) <= max(16 * 50, hidden.numel()) < 400 * 50


def test_without_gradients_and_without_labels() -> None:
    """Under no_grad the same loss comes out; a batch with nothing to count gives 0 and zero gradients, not NaN."""
    hidden, weight, labels, divisor = tensors()
    with torch.no_grad():
        silent = chunked_loss(hidden, weight, labels, divisor, 0.0, 5)
    torch.testing.assert_close(silent, chunked_loss(hidden, weight, labels, divisor, 0.0, 5).detach())
    empty = chunked_loss(hidden, weight, torch.full_like(labels, -100), divisor)
    empty.backward()
    assert empty == 0 and weight.grad.abs().max() == 0 and hidden.grad.abs().max() == 0
