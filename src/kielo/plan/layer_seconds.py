"""Seconds of a layer's and the head's kernels: matrix products, attention, memory-bound work; no torch.

FLOPs: 2 a weight and token forward, 4 backward (Narayanan et al. 2021, arXiv:2104.04473, appendix), 4 × width
× keys a query for attention, and fused attention's backward 2.5 times its forward (Dao 2023,
arXiv:2307.08691, section 4.1). A collective of n chunks and T seconds beside a product of P seconds adds T /
n, and (n - 1) / n × (T - P) if positive. The product also slows down: its chunks fill the device less, share
it, and are copied into the sequence's order. How much slower, and how many more kernels, are assumptions.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kielo.plan.collective_seconds import (
    gather_logits_seconds,
    ring_bandwidth,
    tensor_halves,
    tensor_layer_seconds,
)
from kielo.plan.efficiency import AMD, ARCHITECTURES, ENGINES
from kielo.plan.workload import Workload

Column = np.ndarray
_TILE = 64
_BF16_BYTES = 2
# Bytes of an element that eager PyTorch moves beyond a fused norm: each step goes through memory, to fp32,
# squared, averaged, scaled, back, times the weight.
_EAGER_NORM_BYTES = 36
# Assumed: kernels that a chunk of overlapped collectives adds, by a layer's about 100 kernels: a collective,
# a product and a copy for each of six products.
_CHUNK_LAUNCHES = 18 / 100
# Assumed: the share of its rate that a product keeps beside a collective, whose kernels take multiprocessors.
BESIDE_COLLECTIVE = 0.9
# Bytes of a logit: read and written as bf16 and fp32, with gradients. Eager: each step of a loss in fp32
# (maximum, difference, exponential, sum, quotient, gradient) goes through memory.
_LOGIT_BYTES, _EAGER_LOGIT_BYTES = 16, 52
_AMD = [ARCHITECTURES.index(name) for name in AMD]
_EXPERT_LAUNCHES = 1.0  # kernels of routing, sorting and exchange, by a dense layer's kernels
# Seconds of fused attention's backward, by its seconds if it may add gradients of queries in any order: at
# most 37.9 % less throughput with a causal mask (Qiang et al. 2026, arXiv:2601.21824).
_DETERMINISTIC_BACKWARD = 1.6
# DeepSpeed copies a bf16 gradient to fp32 before it adds it, and clears it.
_COPIED_GRADIENT_BYTES = 10


@dataclass(frozen=True)
class LayerSeconds:
    """Columns [n]: seconds of a micro-batch on one device, forward plus backward, with recomputation."""

    matrix: Column
    attention: Column
    elementwise: Column
    launch: Column
    is_processor: Column

    def total(self, traffic: Column) -> Column:
        """Compute seconds of the layer with `traffic` between its kernels.

        A layer is not faster than its kernels are launched. The root of the sum of squares is taken because
        work and launches of similar length sometimes wait for each other. On a processor both add up.
        """
        device = self.matrix + self.attention + self.elementwise + traffic
        return np.where(self.is_processor, device + self.launch, np.hypot(device, self.launch))


def layer_seconds(work: Workload, rates: Any) -> LayerSeconds:
    forward_matrix, backward_matrix = _matrix_seconds(work, rates)
    passes = (3 + work.layers_again) / 3 * np.where(work.tensor > 1, rates.tensor_launch, 1.0)
    passes = passes * np.where(work.unfused_norms > 0, rates.eager_launch, 1.0)
    again = work.layers_again + (1 - work.layers_again) * work.operators_again * 0.5
    elementwise = _elementwise_seconds(work, rates)
    elementwise = elementwise * (3 + np.maximum(work.layers_again, work.operators_again)) / 3
    attention, backward = _attention_seconds(work, rates)
    attention_again = np.maximum(work.layers_again, work.attention_again)
    launch = rates.layer_seconds * passes * (1 + _CHUNK_LAUNCHES * (work.overlap_chunks - 1))
    return LayerSeconds(
        forward_matrix * (1 + again) + backward_matrix,
        attention * (1 + backward + attention_again),
        elementwise + _cheap_again_seconds(work, rates),
        launch * (1 + _is_routed(work) * work.expert_layers * _EXPERT_LAUNCHES),
        work.architecture == ARCHITECTURES.index("cpu"),
    )


def head_seconds(work: Workload, rates: Any) -> Column:
    """Compute seconds of the output matrix and the loss. The weight's gradient is wide in every recipe."""
    rows = work.vocabulary / work.tensor
    is_in, wide = (work.recipe > 0) & (work.head_in_recipe > 0), np.zeros(len(work), bool)
    sides = work.tokens, rows, work.hidden
    product = sum(product_seconds(work, rates, *sides, recipe) for recipe in (is_in, is_in, wide))
    whole = work.whole_logits > 0
    each = np.where(work.unfused_loss > 0, _EAGER_LOGIT_BYTES, _LOGIT_BYTES)
    logits = each * work.tokens * np.where(whole, work.vocabulary, rows)
    gathered = np.where(whole & (work.tensor > 1), gather_logits_seconds(work, rates), 0.0)
    return product + logits / (work.memory_bandwidth * rates.memory) + gathered


def matrix_flops(work: Workload) -> Column:
    """Compute forward FLOPs of one layer's matrix products, for a micro-batch on a device."""
    products = matrix_products(work)
    return sum(2 * one.times * one.groups * one.rows * one.columns * one.inner for one in products)


@dataclass(frozen=True)
class Product:
    """Forward products [rows, inner] × [inner, columns]: `groups` at once, in the share `times` of layers."""

    rows: Column
    columns: Column
    inner: Column
    groups: Column | float = 1.0
    times: Column | float = 1.0
    is_summed: bool = False  # over tensor ranks


def matrix_products(work: Workload) -> list[Product]:
    """Return the products of projections, MLPs and experts. Each expert gets equally many tokens."""
    q = work.heads * work.head_dim
    kv = np.maximum(work.kv_heads, np.minimum(work.tensor, work.heads)) * work.head_dim
    tokens, gates = work.tokens, work.mlp_matrices - 1
    products = [
        Product(tokens, (q + 2 * kv) / work.tensor, work.hidden, times=work.projection_share),
        Product(tokens, work.hidden, q / work.tensor, times=work.projection_share, is_summed=True),
    ]
    shared = work.shared_ffn, work.expert_layers * (work.shared_ffn > 0)
    for width, share in ((work.ffn, 1 - work.expert_layers), shared):
        width = np.maximum(width, 1) / work.tensor
        products += [
            Product(tokens, gates * width, work.hidden, times=share),
            Product(tokens, work.hidden, width, times=share, is_summed=True),
        ]
    local = np.maximum(work.experts / work.expert_ranks, 1)
    rows = tokens * np.maximum(work.experts_each, 1) / local * work.expert_tensor / work.tensor
    width = np.maximum(work.expert_ffn, 1) / work.expert_tensor
    products += [
        Product(rows, gates * width, work.hidden, local, work.expert_layers),
        Product(rows, work.hidden, width, local, work.expert_layers),
    ]
    return [product for product in products if np.any(product.times)]


def _is_routed(work: Workload) -> Column:
    return (work.experts > 1).astype(float)


def _matrix_seconds(work: Workload, rates: Any) -> tuple[Column, Column]:
    in_recipe, wide = work.recipe > 0, np.zeros(len(work), bool)
    share = np.where(in_recipe, work.recipe_share, 1.0)
    last_in_recipe = in_recipe & ~(work.wide_weight_gradients > 0)
    forward, backward = np.zeros(len(work)), np.zeros(len(work))
    for part in matrix_products(work):
        rows, columns, inner = part.rows, part.columns, part.inner
        inputs, weights = (rows, inner, columns), (columns, inner, rows)
        passes = ((rows, columns, inner), in_recipe), (inputs, in_recipe), (weights, last_in_recipe)
        seconds = []
        for sides, is_in in passes:
            time = product_seconds(work, rates, *sides, is_in, part.groups)
            if np.any(share < 1):
                time = share * time + (1 - share) * product_seconds(work, rates, *sides, wide, part.groups)
            seconds.append(time)
        forward = forward + part.times * seconds[0]
        # no gradient is multiplied out for a weight that is frozen
        backward = backward + part.times * (seconds[1] + (1.0 - work.frozen) * seconds[2])
    return forward, backward


def engine_factor(work: Workload, rates: Any) -> Column:
    """Return the factor of an engine on the rate of its products.

    An engine's calls of NVIDIA's libraries tell nothing of AMD's: Transformer Engine too calls hipBLASLt
    there, as PyTorch does.
    """
    return np.where(np.isin(work.architecture, _AMD), rates.rocm_engine, rates.matrix_engine)


def product_seconds(
    work: Workload,
    rates: Any,
    rows: Column,
    columns: Column,
    inner: Column,
    in_recipe: Column,
    groups: Column | float = 1.0,
) -> Column:
    """Compute seconds of `groups` products [rows, inner] × [inner, columns].

    Matrix units and memory work at once. Results are computed in waves of tiles. The last wave is on average
    half empty, and each tile takes a while to begin.
    """
    scales = np.choose(work.recipe.astype(int), [1.0, 1.0, rates.fp8_rowwise, rates.mxfp8, rates.nvfp4])
    rate = np.where(in_recipe, work.peak_recipe * rates.matrix_fp8 * scales, work.peak * rates.matrix)
    rate = rate * engine_factor(work, rates) * work.power_share**rates.power
    waves = 1 + rates.wave_elements / (groups * rows * columns)
    begin = 1 + rates.tile / inner
    crooked = np.where((columns % _TILE > 0) | (inner % _TILE > 0), rates.misaligned, 1.0)
    bytes_moved = _BF16_BYTES * groups * (rows * inner + inner * columns + rows * columns)
    units = 2 * groups * rows * columns * inner / rate * waves * begin * crooked
    return np.hypot(units, bytes_moved / (work.memory_bandwidth * rates.memory))


def _attention_seconds(work: Workload, rates: Any) -> tuple[Column, Column]:
    """Return (seconds of attention forward, backward as a factor of forward)."""
    heads = work.heads / work.tensor
    pairs = work.tokens * work.sequence * heads  # query and key of a head; a causal mask leaves half of them
    flops = 4 * pairs * work.head_dim
    small = 1 + rates.small_heads * np.maximum(0, np.log2(128 / work.head_dim))
    by_kernel = np.choose(work.kernel.astype(int), [1.0, 1.0, rates.flash_1, 1.0, rates.flash_cudnn])
    flash_rate = work.peak * rates.flash / small * by_kernel
    flash_rate = flash_rate * work.power_share**rates.power
    eager = np.where(work.kernel == 0, rates.unfused_attention, 1.0)
    score_bytes = pairs * rates.softmax_bytes * eager / 3
    product_rate = work.peak * rates.matrix * engine_factor(work, rates) / (1 + rates.tile / work.head_dim)
    product_rate = product_rate / np.where(work.head_dim % 8 > 0, rates.odd_heads, 1.0)
    plain = flops / product_rate + score_bytes / (work.memory_bandwidth * rates.memory)
    is_flash = work.kernel >= 2
    fused_backward = 2.5 * np.where(work.deterministic > 0, _DETERMINISTIC_BACKWARD, 1.0)
    has_biases = work.biases > 0
    # Fused kernels leave out what is masked, but not what a bias masks. Biases are written and read.
    seen = flops / np.where((work.causal > 0) & ~has_biases, 2, 1)
    biases = np.where(has_biases, 2 * _BF16_BYTES * pairs, 0.0) / (work.memory_bandwidth * rates.memory)
    backward = np.where(is_flash, fused_backward + has_biases, 2.0)  # which computes the forward again
    return np.where(is_flash, seen / flash_rate + biases, plain), backward


def _cheap_again_seconds(work: Workload, rates: Any) -> Column:
    """Compute seconds of recomputed norms and activations, each of which reads and writes once."""
    share = np.where(work.sequence_parallel > 0, 1 / work.tensor, 1.0)
    norms = 2 * 2 * work.hidden * share * work.norms_again
    elements = norms + _activation_elements(work) * work.activations_again
    moved = rates.elementwise * _BF16_BYTES * work.tokens * elements
    return moved / (work.memory_bandwidth * rates.memory)


def _activation_elements(work: Workload) -> Column:
    """Return elements a token that the MLP's activation reads and writes, on a tensor rank."""
    return work.mlp_width_of_token * work.mlp_matrices / work.tensor


def _elementwise_seconds(work: Workload, rates: Any) -> Column:
    """Compute seconds of memory-bound work, forward and backward.

    Fewest bytes a token, forward: two norms (read, write), two additions (two reads, a write), rope on
    queries, keys and values (read, write), and the activation. Once a micro-batch, gradients of the weights
    are added to earlier ones.
    """
    # Below 1, `unfused_norms` is a norm's share of steps in one kernel, which moves no more bytes.
    norms = 2 * (2 * _BF16_BYTES + _EAGER_NORM_BYTES * (work.unfused_norms >= 1))
    share = np.where(work.sequence_parallel > 0, 1 / work.tensor, 1.0)
    whole = share * work.hidden * (norms + 2 * 3 * _BF16_BYTES)
    heads = (work.heads + 2 * work.kv_heads) * work.head_dim * 2
    split = _BF16_BYTES * (heads / work.tensor + _activation_elements(work))
    # Each copy of a token is written in its expert's order and read, and the same on the way back.
    copies = _is_routed(work) * work.expert_layers * work.experts_each
    sorted_ = copies * 4 * _BF16_BYTES * work.hidden / work.tensor
    products = matrix_products(work)
    inputs = sum(part.times * part.groups * part.rows / work.tokens * part.inner for part in products)
    quantised = np.where(work.recipe > 0, rates.quantise, 0.0) * inputs
    passing = 3 * work.tokens * (rates.elementwise * (whole + split + sorted_) + quantised)
    is_added = (work.zero < 3) & (work.micro_batches > 1)
    is_copied = (work.engine == ENGINES.index("megatron_deepspeed")) & (work.gradient_bytes > _BF16_BYTES)
    bytes_each = 2 + 2 * work.gradient_bytes + np.where(is_copied, _COPIED_GRADIENT_BYTES, 0.0)
    accumulate = np.where(work.apart_accumulation > 0, 1.0, rates.accumulate)
    added = np.where(is_added, accumulate * bytes_each * work.layer_parameters_of_rank, 0.0)
    added = (1.0 - work.frozen) * added
    return (passing + added) / (work.memory_bandwidth * rates.memory)


def exposed_tensor_seconds(work: Workload, rates: Any) -> Column:
    """Return the seconds that tensor-parallel traffic adds to a layer and micro-batch, forward and backward.

    Chunked are the gathers before column-split matrices in each forward pass, and, unless whole layers are
    recomputed, the sums after row-split matrices and the gathers before their backward. Other collectives run
    beside products in any case and count as in `tensor_layer_seconds`.
    """
    at_once = tensor_layer_seconds(work, rates)
    if not np.any(work.overlap_chunks > 1):
        return at_once
    forward = 1 + work.layers_again
    is_joined = work.layers_again == 0
    added, halves = np.zeros(len(work)), np.zeros(len(work))
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
    """Compute seconds of a product and its collective beyond the product alone. copied: elements."""
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
    return product.rows * (product.columns if is_result else product.inner)
