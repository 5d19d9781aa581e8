"""Seconds of tensor-parallel traffic where collectives run beside products in chunks; no torch.

Of a collective of n chunks and T seconds beside a product of P seconds, T / n is waited for, as the first
gather (or the last sum) has nothing beside it; of the others what is longer than the product,
(n - 1) / n × (T - P), if positive.
The product takes longer: smaller products fill the device less, by the formula of any product; beside a
collective it is slower; and its chunks are copied into the sequence's order. How much slower, and how many
more kernels are launched, are assumptions: no published run and no measurement of ours separates them.
"""

from typing import Any

import numpy as np

from kielo.plan.collective_seconds import ring_bandwidth, tensor_halves, tensor_layer_seconds
from kielo.plan.layer_seconds import Product, matrix_products, product_seconds
from kielo.plan.workload import Workload

Column = np.ndarray
_BF16_BYTES = 2
# Assumed: the share of its rate that a product keeps beside a collective, whose kernels take up some of the
# device's multiprocessors.
BESIDE_COLLECTIVE = 0.9


def exposed_tensor_seconds(work: Workload, rates: Any) -> Column:
    """Computes seconds of a layer and micro-batch that tensor-parallel traffic adds, forward and backward.

    Chunked are the gathers before column-split matrices, in each forward pass; and, unless whole layers are
    made again, the sums after row-split ones and the gathers before these matrices' backward. The gather of
    inputs again, and the sums of their gradients, run beside products in any case and count as in
    `tensor_layer_seconds`.
    """
    at_once = tensor_layer_seconds(work, rates)
    if not np.any(work.overlap_chunks > 1):
        return at_once
    forward = 1 + work.layers_again
    is_joined = work.layers_again == 0
    added, halves = 0.0, 0.0
    for product in matrix_products(work):
        if not product.is_summed:
            added = added + forward * _chunked(work, rates, product, _copied(product, True))
            halves = halves + forward
            continue
        turned = Product(product.rows, product.inner, product.columns, product.groups, product.times)
        both = _chunked(work, rates, product, _copied(product, False))
        both = both + _chunked(work, rates, turned, _copied(turned, True) + _copied(turned, False))
        added, halves = added + is_joined * both, halves + 2 * is_joined
    left = 1 - halves / tensor_halves(work)
    return np.where(work.overlap_chunks > 1, at_once * left + added, at_once)


def _chunked(work: Workload, rates: Any, product: Product, copied: Column) -> Column:
    """Computes seconds that a product and its collective take beyond the product alone at once.

    copied: elements that are copied for it.
    """
    n = work.overlap_chunks
    wide = np.zeros(len(work), bool)
    alone = product_seconds(work, rates, product.rows, product.columns, product.inner, wide)
    pieces = n * product_seconds(work, rates, product.rows / n, product.columns, product.inner, wide)
    share = (work.tensor - 1) / work.tensor
    bandwidth = ring_bandwidth(work, rates, np.minimum(work.tensor, work.node_devices), work.tensor)
    half = share * work.tokens * work.hidden * _BF16_BYTES / bandwidth
    half = half + n * rates.latency_seconds * np.sqrt(work.tensor) / 2
    exposed = half / n + (n - 1) / n * np.maximum(0.0, half - pieces)
    slowed = (n - 1) / n * np.minimum(half, pieces) * (1 / BESIDE_COLLECTIVE - 1)
    copies = 2 * _BF16_BYTES * copied / (work.memory_bandwidth * rates.memory)
    return product.times * (exposed * rates.tensor_exposed + pieces - alone + slowed + copies)


def _copied(product: Product, is_result: bool) -> Column:
    """Returns elements of the product's result, or of its input."""
    return product.rows * (product.columns if is_result else product.inner)
