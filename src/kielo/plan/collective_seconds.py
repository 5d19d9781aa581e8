"""Seconds of collectives by α–β models on the levels of a machine; arithmetic, no torch.

Thakur et al. 2005 (doi:10.1177/1094342005051521): a ring of t devices moves 2(t - 1)/t of the bytes for an
all-reduce, (t - 1)/t for either of its halves.
"""

from typing import Any

import numpy as np

from kielo.plan.efficiency import ARCHITECTURES, ENGINES
from kielo.plan.workload import Workload

Column = np.ndarray
_BF16_BYTES, _FP32_BYTES = 2, 4


def ring_bandwidth(work: Workload, rates: Any, neighbours: Column, group: Column) -> Column:
    """Compute bytes/s of a device in a ring over `group` devices, `neighbours` of them in its node.

    Within a node it is the link's bandwidth. Across nodes, the rings of a node share its network: each of g
    neighbours adds its own share, and one ring can use all of them.
    """
    inside = work.node_bandwidth * rates.node
    reached = np.where(work.ring_share > 0, work.ring_share, rates.network)
    outside = work.network_bandwidth * reached * np.minimum(neighbours, work.node_devices)
    return np.where(group <= neighbours, inside, np.minimum(inside, outside))


def tensor_layer_seconds(work: Workload, rates: Any) -> Column:
    """Compute exposed seconds of tensor-parallel traffic, for a layer and micro-batch."""
    bytes_each = work.tokens * work.hidden * _BF16_BYTES
    bandwidth = ring_bandwidth(work, rates, np.minimum(work.tensor, work.node_devices), work.tensor)
    share = (work.tensor - 1) / work.tensor
    seconds = 2 * share * bytes_each / bandwidth + rates.latency_seconds * np.sqrt(work.tensor)
    times = tensor_halves(work) / 2
    return np.where(work.tensor > 1, times * seconds * rates.tensor_exposed, 0.0)


def tensor_halves(work: Workload) -> Column:
    """Count all-gathers and reduce-scatters, the halves of all-reduces, over tensor ranks in a layer.

    An all-reduce after attention and after the MLP, forward, backward, and for recomputation. With sequence
    parallelism, inputs are gathered once more for the gradients of weights (Korthikanti et al. 2022,
    arXiv:2205.05198, section 4.2).
    """
    routed = work.expert_layers * (work.experts > 1)
    # Experts that are split over tensor ranks need each copy of a token on all of them. Traffic to whole
    # experts is counted by `expert_layer_seconds` alone.
    copies = np.where(work.expert_tensor >= work.tensor, work.experts_each, 0) + (work.shared_ffn > 0)
    halves = 1 + (1 - routed) + routed * copies  # attention, and the MLP or the experts in its place
    return halves * (4 + 2 * work.layers_again + work.sequence_parallel)


def expert_layer_seconds(work: Workload, rates: Any) -> Column:
    """Compute exposed seconds of tokens to their experts and back. Links in and between nodes overlap."""
    times = work.expert_layers * (4 + 2 * work.layers_again)
    bytes_each = work.tokens / work.tensor * work.experts_each * work.hidden * _BF16_BYTES
    near = np.clip(work.node_devices / work.expert_tensor, 1, work.expert_ranks)
    far = work.expert_ranks - near
    inside = (near - 1) / work.expert_ranks * bytes_each / (work.node_bandwidth * rates.node)
    outside = far / work.expert_ranks * bytes_each / (work.network_bandwidth * rates.network)
    seconds = np.maximum(inside, outside) + rates.latency_seconds * np.sqrt(work.expert_ranks)
    return np.where(work.expert_ranks > 1, times * seconds * rates.tensor_exposed, 0.0)


def gather_logits_seconds(work: Workload, rates: Any) -> Column:
    """Compute seconds a micro-batch to gather bf16 logits of the whole vocabulary on each tensor rank."""
    bytes_all = work.tokens * work.vocabulary * _BF16_BYTES
    bandwidth = ring_bandwidth(work, rates, np.minimum(work.tensor, work.node_devices), work.tensor)
    return (work.tensor - 1) / work.tensor * bytes_all / bandwidth


def context_layer_seconds(work: Workload, rates: Any) -> Column:
    """Compute exposed seconds of context-parallel traffic: keys and values round, their gradients back."""
    bytes_all = 2 * work.kv_heads * work.head_dim / work.tensor * work.tokens * work.context * _BF16_BYTES
    neighbours = np.clip(work.node_devices / work.tensor, 1, work.context)
    bandwidth = ring_bandwidth(work, rates, neighbours, work.context)
    seconds = 3 * (work.context - 1) / work.context * bytes_all / bandwidth + 3 * rates.latency_seconds
    return np.where(work.context > 1, seconds * rates.tensor_exposed, 0.0)


def stage_seconds(work: Workload, rates: Any) -> Column:
    """Compute seconds to send a micro-batch's hidden states one stage on, each tensor rank its part."""
    bytes_each = work.tokens * work.hidden * _BF16_BYTES / work.tensor
    is_inside = work.devices <= work.node_devices
    bandwidth = np.where(is_inside, work.node_bandwidth * rates.node, work.network_bandwidth * rates.network)
    return np.where(work.pipeline > 1, bytes_each / bandwidth + rates.latency_seconds, 0.0)


def data_seconds(work: Workload, rates: Any) -> tuple[Column, Column]:
    """Compute seconds of data-parallel traffic before anything is hidden: (a step, a micro-batch).

    ZeRO 0 adds up gradients once a step. Degrees 1 and 2 scatter them and gather parameters, which moves as
    much. DeepSpeed's optimiser for bf16 adds up whole gradients and gathers parameters, half as much again
    (logs of a 175B on LUMI, spyysalo/lumi-llm-scaling). Degree 3 (and FSDP) gathers parameters for each
    forward and backward pass of a micro-batch and scatters gradients after it. On a processor the
    collectives of each layer, and of the rest, begin separately. On a GPU `ring_steps_seconds` counts what
    grows with the ranks.
    """
    ranks = work.data * work.context
    is_processor = work.architecture == ARCHITECTURES.index("cpu")
    routed = work.layers_of_heaviest_rank * work.routed_layer_parameters_of_rank
    once, each = _replica_seconds(work, rates, work.parameters_of_heaviest_rank - routed, ranks, work.tensor)
    # Replicas of an expert are as many ranks apart as ranks divide the experts of a layer.
    stride = work.expert_ranks * work.expert_tensor
    once_routed, each_routed = _replica_seconds(work, rates, routed, ranks * work.tensor / stride, stride)
    latency = rates.latency_seconds * np.log2(np.maximum(ranks, 2))
    begins = 3 * work.layers * is_processor
    each = each + each_routed + np.where((work.zero == 3) & (work.shard > 1), begins * latency, 0.0)
    units = np.where(is_processor, 2 * (np.where(work.zero < 3, work.layers_of_heaviest_rank, 0) + 1), 1.0)
    return np.where(ranks > 1, once + once_routed + units * latency, 0.0), each


def ring_steps_seconds(work: Workload, rates: Any) -> tuple[Column, Column]:
    """Compute seconds of the steps of data-parallel rings beyond their bytes: (a step, a micro-batch).

    A collective over n ranks takes n - 1 steps one after the other, for each layer that has its own: three a
    layer and micro-batch at degree 3, two a layer and step if FSDP reduces layer by layer. Megatron's buckets
    grow with the ranks, and DeepSpeed's are few.
    """
    is_gpu = work.architecture != ARCHITECTURES.index("cpu")
    ranks = work.data * work.context
    ring = is_gpu * rates.hop_seconds * (np.where(work.zero > 0, np.minimum(work.shard, ranks), ranks) - 1)
    each = np.where(work.zero == 3, 3 * work.layers_of_heaviest_rank * ring, 0.0)
    is_by_layer = (work.zero < 3) & (work.engine == ENGINES.index("fsdp"))
    return np.where(is_by_layer, 2 * work.layers_of_heaviest_rank * ring, 0.0), each


def _replica_seconds(
    work: Workload, rates: Any, parameters: Column, ranks: Column, stride: Column
) -> tuple[Column, Column]:
    """Compute (a step, a micro-batch) for `parameters` with replicas on `ranks` devices, `stride` apart."""
    ranks = np.maximum(ranks, 1)
    bytes_all = parameters * _BF16_BYTES
    neighbours = np.clip(work.node_devices / stride, 1, ranks)
    bandwidth = ring_bandwidth(work, rates, neighbours, ranks)
    shard = np.minimum(work.shard, ranks)
    shard_bandwidth = ring_bandwidth(work, rates, np.minimum(neighbours, shard), shard) * rates.gather
    copies = ranks / shard
    # Kielo gathers parameters in the precision of the compute, or matrices in 8 bits, and adds up gradients
    # in fp32 or bf16. At degree 2 it scatters them after each micro-batch, unless the backward pass is split.
    is_own = work.compute_bytes > 0
    half = (ranks - 1) / ranks * parameters / bandwidth  # seconds for a byte of each parameter
    of_layers = work.layers_of_heaviest_rank * work.layer_parameters_of_rank
    layers = np.minimum(of_layers / np.maximum(parameters, 1), 1.0)
    mean_bytes = layers * work.gathered_bytes + (1 - layers) * work.compute_bytes
    gathered = half * np.where(is_own, mean_bytes, _BF16_BYTES)
    # the remaining share of bytes if matrices are gathered in FP8
    narrowed = np.where(is_own, mean_bytes / np.maximum(work.compute_bytes, 1), 1.0)
    trained = 1.0 - layers * work.frozen
    scattered = trained * half * np.where(is_own, work.reduce_bytes, _BF16_BYTES)
    scattered = scattered * np.where(work.whole_gradients > 0, 2.0, 1.0)
    # the remaining share of gradients' bytes if they are reduced in bf16, or layers are frozen
    halved = trained * np.where(is_own, work.reduce_bytes / _FP32_BYTES, 1.0)
    is_each = is_own & (work.zero == 2) & ~((work.pipeline > 1) & (work.splits_backward > 0))
    between_copies = 2 * (copies - 1) / copies * bytes_all / shard / (work.network_bandwidth * rates.network)
    once = np.where(work.zero < 3, gathered + np.where(is_each, 0.0, scattered), between_copies * halved)
    # in bf16, as fitted to engines whose gradients are fp32 too
    whole = 3 * (shard - 1) / shard * bytes_all / shard_bandwidth
    each = np.where(work.zero == 3, whole * (2 * narrowed + halved) / 3, 0.0)
    return once, each + np.where(is_each, scattered, 0.0)
