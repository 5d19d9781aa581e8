"""Seconds of one layer's kernels, and of the head's, for a micro-batch: matrix products, attention, memory-bound work.

FLOPs: 2 a weight and token forward, 4 backward (Narayanan et al. 2021, arXiv:2104.04473, appendix), 4 × width × keys a
query for attention, and fused attention's backward 2.5 times its forward (Dao 2023, arXiv:2307.08691, section 4.1).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kielo.plan.workload import Workload

Column = np.ndarray
_TILE = 64
_BF16_BYTES = 2
_EAGER_NORM_BYTES = 24  # an element: to fp32, squared, scaled and back, each through memory, less what a fused norm moves


@dataclass(frozen=True)
class LayerSeconds:
    """Columns [n], seconds of a micro-batch on one device: forward plus backward, with what is computed anew."""

    matrix: Column
    attention: Column
    elementwise: Column
    launch: Column

    def total(self, traffic: Column) -> Column:
        """With `traffic` between its kernels. A layer is not faster than its kernels are launched; the square root of the
        sum of squares, because near that both wait for each other now and then.
        """
        device = self.matrix + self.attention + self.elementwise + traffic
        return np.hypot(device, self.launch)


def layer_seconds(work: Workload, rates: Any) -> LayerSeconds:
    """`rates` as `Efficiency.of` gives them."""
    in_recipe = work.recipe > 0
    forward_matrix = sum(_product_seconds(work, rates, work.tokens, n, k, in_recipe) for n, k in _matrices(work))
    backward_matrix = sum(
        _product_seconds(work, rates, work.tokens, k, n, in_recipe)
        + _product_seconds(work, rates, n, k, work.tokens, in_recipe)
        for n, k in _matrices(work)
    )
    passes = (3 + work.layers_again) / 3 * np.where(work.tensor > 1, rates.tensor_launch, 1.0)
    again = work.layers_again + (1 - work.layers_again) * work.operators_again * 0.5
    elementwise = _elementwise_seconds(work, rates)
    attention, backward = _attention_seconds(work, rates)
    attention_again = np.maximum(work.layers_again, work.attention_again)
    return LayerSeconds(
        forward_matrix * (1 + again) + backward_matrix,
        attention * (1 + backward + attention_again),
        elementwise * (3 + np.maximum(work.layers_again, work.operators_again)) / 3,
        rates.layer_seconds * passes,
    )


def head_seconds(work: Workload, rates: Any) -> Column:
    """Of the output matrix and the loss; in bf16 whatever the recipe, as engines keep it."""
    rows = work.vocabulary / work.tensor
    product = 3 * _product_seconds(work, rates, work.tokens, rows, work.hidden, np.zeros(len(work), bool))
    logits = 16 * work.tokens * rows  # bytes: read and written as bf16 and fp32, with gradients
    return product + logits / (work.memory_bandwidth * rates.memory)


def matrix_flops(work: Workload) -> Column:
    """FLOPs of one layer's matrix products for a micro-batch on a device, forward."""
    return sum(2 * work.tokens * n * k for n, k in _matrices(work))


def _matrices(work: Workload) -> list[tuple[Column, Column]]:
    """(outputs, inputs) on a device of queries with keys and values, output, MLP in, MLP out."""
    q, kv = work.heads * work.head_dim, np.maximum(work.kv_heads, np.minimum(work.tensor, work.heads)) * work.head_dim
    return [
        ((q + 2 * kv) / work.tensor, work.hidden),
        (work.hidden, q / work.tensor),
        ((work.mlp_matrices - 1) * work.ffn / work.tensor, work.hidden),
        (work.hidden, work.ffn / work.tensor),
    ]


def _product_seconds(
    work: Workload, rates: Any, rows: Column, columns: Column, inner: Column, in_recipe: Column
) -> Column:
    """Of [rows, inner] × [inner, columns]: what the units take, and the operands' way through memory.

    The result is made in waves of tiles, of which the last is on average half empty; each tile takes a while to begin.
    """
    scales = np.choose(work.recipe.astype(int), [1.0, 1.0, rates.fp8_rowwise, rates.mxfp8, rates.nvfp4])
    rate = np.where(in_recipe, work.peak_recipe * rates.matrix_fp8 * scales, work.peak * rates.matrix)
    rate = rate * rates.matrix_engine * work.power_share**rates.power
    waves = 1 + rates.wave_elements / (rows * columns)
    begin = 1 + rates.tile / inner
    crooked = np.where((columns % _TILE > 0) | (inner % _TILE > 0), rates.misaligned, 1.0)
    bytes_moved = _BF16_BYTES * (rows * inner + inner * columns + rows * columns)
    return 2 * rows * columns * inner / rate * waves * begin * crooked + bytes_moved / (
        work.memory_bandwidth * rates.memory
    )


def _attention_seconds(work: Workload, rates: Any) -> tuple[Column, Column]:
    """(seconds forward, how many times as many backward)."""
    heads = work.heads / work.tensor
    pairs = work.tokens * work.sequence * heads  # query and key of a head; a causal mask leaves half of them
    flops = 4 * pairs * work.head_dim
    small = 1 + rates.small_heads * np.maximum(0, np.log2(128 / work.head_dim))
    flash_rate = work.peak * rates.flash / small * np.where(work.kernel == 2, rates.flash_1, 1.0)
    flash_rate = flash_rate * work.power_share**rates.power
    eager = np.where(work.kernel == 0, rates.unfused_attention, 1.0)
    score_bytes = pairs * rates.softmax_bytes * eager / 3
    product_rate = work.peak * rates.matrix * rates.matrix_engine / (1 + rates.tile / work.head_dim)
    product_rate = product_rate / np.where(work.head_dim % 8 > 0, rates.odd_heads, 1.0)
    plain = flops / product_rate + score_bytes / (work.memory_bandwidth * rates.memory)
    is_flash = work.kernel >= 2
    return np.where(is_flash, flops / 2 / flash_rate, plain), np.where(is_flash, 2.5, 2.0)


def _elementwise_seconds(work: Workload, rates: Any) -> Column:
    """Forward and backward. Fewest bytes a token, forward: two norms (read, write), two additions (two reads, a write),
    queries, keys and values turned (read, write), and the activation. Once a micro-batch: gradients of the weights are
    added to those before.
    """
    norms = 2 * (2 * _BF16_BYTES + _EAGER_NORM_BYTES * work.unfused_norms)
    whole = np.where(work.sequence_parallel > 0, 1 / work.tensor, 1.0) * work.hidden * (norms + 2 * 3 * _BF16_BYTES)
    heads = (work.heads + 2 * work.kv_heads) * work.head_dim * 2
    split = _BF16_BYTES * (heads + work.ffn * work.mlp_matrices) / work.tensor
    columns = sum(inputs for _, inputs in _matrices(work))
    quantised = np.where(work.recipe > 0, rates.quantise, 0.0) * columns
    passing = 3 * work.tokens * (rates.elementwise * (whole + split) + quantised)
    is_added = (work.zero < 3) & (work.micro_batches > 1)
    added = np.where(is_added, rates.accumulate * (4 + 2 * work.gradient_bytes) * work.layer_parameters, 0.0)
    added = added / work.tensor
    return (passing + added) / (work.memory_bandwidth * rates.memory)


