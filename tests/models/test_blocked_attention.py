"""Attention in blocks of queries: what a plain softmax gives, also where there are several blocks."""

import pytest
import torch
from torch import Tensor

from kielo.models.blocks.blocked_attention import Tables, Terms, attend
from kielo.models.blocks.dropout import NoiseMaker, WeightNoise, drop_weights
from tests.models.test_dropout import keys

# 3 × 2 × 331 scores a query: 264 queries are a block of half a million scores, 36 more the next one.
BATCH, HEADS, QUERIES, KEYS, WIDTH, ROWS, RATE = 3, 2, 300, 331, 6, 11, 0.3


def noise() -> WeightNoise:
    maker = NoiseMaker(1, HEADS)
    maker.weight_rate = RATE
    return maker(keys(range(BATCH)), torch.arange(7, 7 + QUERIES), KEYS).of_layer(0).weights


def inputs(dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Queries, keys, values and two tables; the rows, what is visible, and a gradient."""
    generator = torch.Generator().manual_seed(3)
    sizes = ((QUERIES, WIDTH), (KEYS, WIDTH), (KEYS, WIDTH), (QUERIES, ROWS), (KEYS, ROWS), (QUERIES, WIDTH))
    *given, gradient = (torch.randn(BATCH, HEADS, *size, generator=generator).to(dtype) for size in sizes)
    rows = torch.randint(0, ROWS, (QUERIES, KEYS), generator=generator)
    visible = torch.rand(BATCH, 1, QUERIES, KEYS, generator=generator) < 0.6
    return given, rows, visible, gradient


@pytest.mark.parametrize("has_tables", [False, True])
@pytest.mark.parametrize("has_noise", [False, True])
@pytest.mark.parametrize(
    ("dtype", "bar"), [(torch.float64, 1e-12), (torch.bfloat16, 3e-2)], ids=["fp64", "bf16"]
)
def test_blocks_are_the_plain_softmax(has_tables: bool, has_noise: bool, dtype: torch.dtype, bar: float):
    """Outputs and all gradients, in relative L2, in the precision of what was given."""
    given, rows, visible, gradient = inputs(dtype)
    dropped = noise() if has_noise else None
    mine, plain = ([one.detach().clone().requires_grad_() for one in given] for _ in range(2))
    tables = Tables(*mine[3:], rows) if has_tables else None
    seen = visible if has_noise else None
    out = attend(*mine[:3], Terms(0.7, tables, seen, dropped))
    q, k, v, of_queries, of_keys = (one.double() for one in plain)
    scores = 0.7 * q @ k.mT
    if has_tables:
        places = rows.expand(scores.shape)
        scores = scores + of_queries.gather(-1, places) + of_keys.mT.gather(-2, places)
    if has_noise:
        scores = scores.masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1)
    expected = (drop_weights(weights, dropped) if has_noise else weights) @ v
    assert out.dtype == dtype and relative(out.detach(), expected.detach()) < bar
    out.backward(gradient)
    expected.backward(gradient.double())
    for number in range(5 if has_tables else 3):
        assert mine[number].grad.dtype == dtype
        assert relative(mine[number].grad, plain[number].grad) < bar, number


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())
