"""Attention of the last queries of a sequence: a dense softmax under a mask says the same, and so do its
gradients.
"""

from types import SimpleNamespace

import pytest
import torch

from kielo.parallel.lower_right_attention import OPERATOR, attend_to_all, has_kernel

BATCH, HEADS, WIDTH = 2, 3, 8


def inputs(queries: int, keys: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(BATCH, HEADS, length, WIDTH) for length in (queries, keys, keys)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log of the softmax's sum: query i of the last ones sees the keys up to its own place."""
    queries, keys = q.shape[2], k.shape[2]
    places = torch.arange(keys - queries, keys)
    is_hidden = torch.arange(keys) > places[:, None]
    scores = (q @ k.mT * scale).masked_fill(is_hidden, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (5, 12), (1, 9), (7, 8)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_output_and_gradients_are_those_of_a_dense_mask(queries: int, keys: int, scale: float | None) -> None:
    """Also where no key comes before the queries, and with 1/√k where no scale is given."""
    used = 8**-0.5 if scale is None else scale
    mine, plain = ([tensor.requires_grad_() for tensor in inputs(queries, keys)] for _ in range(2))
    found, (expected, log_sum) = attend_to_all(*mine, scale), dense(*plain, used)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
    assert torch.allclose(OPERATOR(*mine, used)[1].double(), log_sum, rtol=1e-6)
    weights = torch.linspace(-1, 2, found.numel(), dtype=torch.float64).view_as(found)
    for output in (found, expected):
        (output * weights).sum().backward()
    for one, other in zip(mine, plain, strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_a_compiler_is_told_the_shapes() -> None:
    """Those of the queries, of one number for each, and of each input's gradient."""
    q, k, v = (tensor.to("meta") for tensor in inputs(5, 12, torch.bfloat16))
    out, log_sum = OPERATOR(q, k, v, 0.5)
    assert (out.shape, out.dtype) == ((BATCH, HEADS, 5, WIDTH), torch.bfloat16)
    assert (log_sum.shape, log_sum.dtype) == ((BATCH, HEADS, 5), torch.float32)
    backward = torch.ops.kielo.lower_right_attention_backward
    gradients = backward(out, q, k, v, out, log_sum, 0.5)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    ("device", "dtype", "width", "has_one"),
    [
        ("cpu", torch.float32, 300, True), ("cuda", torch.float32, 64, False),
        ("cuda", torch.bfloat16, 64, True), ("cuda", torch.float16, 256, True),
        ("cuda", torch.float16, 264, False), ("cuda", torch.bfloat16, 60, False),
        ("cuda", torch.bfloat16, 63, False),
    ],
)  # fmt: skip
def test_which_queries_a_kernel_takes(device: str, dtype: torch.dtype, width: int, has_one: bool) -> None:
    """Any on a processor; on a GPU heads in half precision, of a multiple of 8 and at most 256."""
    queries = SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype, shape=(2, 3, 5, width))
    assert has_kernel(queries) == has_one
