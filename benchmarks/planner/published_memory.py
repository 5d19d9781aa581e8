"""Bytes of a device that engines other than Kielo train on; arithmetic, no torch.

Activations by Korthikanti et al. 2022 (arXiv:2205.05198, section 4, equations 1 to 6), written out for any
widths of queries, keys and MLP. Kielo's own bytes are counted in `kielo/resolve/memory.py`.
"""

import numpy as np

from kielo.plan.efficiency import ENGINES
from kielo.plan.workload import Workload
from kielo.resolve.memory import MemoryBytes

Column = np.ndarray
_BF16_BYTES = 2
# Bytes of a logit: bf16 and fp32 where one kernel computes its gradient in place; with a gradient of its own
# where no kernel does; with copies where tensor ranks gather the whole vocabulary.
_LOGIT_BYTES, _PLAIN_LOGIT_BYTES, _WHOLE_LOGIT_BYTES = 6, 10, 20
_OPERATORS_KEPT = 0.55  # share of a layer's activations, where every second matrix product is kept
_UNFUSED_NORM_BYTES = 10  # of an element: fp32 copies of a norm's input and result that eager PyTorch keeps


def formula_memory_bytes(work: Workload) -> MemoryBytes:
    """Computes the bytes of the first pipeline rank or of the last, whichever peaks higher."""
    routed = work.layers_of_heaviest_rank * work.routed_layer_parameters_of_rank
    dense = state_columns(work, work.parameters_of_heaviest_rank - routed, work.shard)
    state = [one + other for one, other in zip(dense, state_columns(work, routed, work.expert_shard))]
    layer, kept = layer_activation_bytes(work), kept_activation_bytes(work)
    layers, chunks = work.layers_of_heaviest_rank, work.chunks
    passes = np.where(
        chunks > 1, np.minimum(work.micro_batches * chunks, (chunks + 1) * work.pipeline - 1) / chunks,
        np.minimum(work.micro_batches, work.pipeline),
    )  # fmt: skip
    # one layer's activations are whole while its gradients are computed
    recomputed = np.where(work.layers_again > 0, layer, 0.0)
    first = passes * layers * kept + recomputed
    last_passes = np.where(
        chunks > 1, (np.minimum(work.micro_batches, work.pipeline) * (chunks - 1) + 1) / chunks, 1.0
    )
    last = last_passes * layers * kept + recomputed
    each = np.where(work.engine == ENGINES.index("megatron_te"), _LOGIT_BYTES, _PLAIN_LOGIT_BYTES)
    each = np.where(work.whole_logits > 0, _WHOLE_LOGIT_BYTES, each / work.tensor)
    logits = each * work.tokens * work.vocabulary
    # The last stage holds its logits while the first, with more passes, waits for gradients.
    first_peaks = (work.pipeline > 1) & (first >= last + logits)
    layer_bytes = work.layer_parameters_of_rank * (_BF16_BYTES + work.gradient_bytes)
    gathered = np.where(
        (work.zero == 3) & (work.shard > 1),
        2 * layer_bytes + _BF16_BYTES * work.vocabulary * work.hidden / work.tensor,
        0.0,
    )
    activations = np.where(first_peaks, first, last)
    return MemoryBytes(*state, activations, np.where(first_peaks, 0.0, logits), gathered)


def state_columns(work: Workload, parameters: Column, shard: Column) -> tuple[Column, Column, Column]:
    """Returns bytes of (weights, gradients, optimiser) of `parameters` [n] on a device, by ZeRO degree.

    `shard` ranks share what that degree divides.

    (w + g + o / shard) bytes a parameter at degree 1 (Rajbhandari et al. 2020, arXiv:1910.02054, figure 1).
    """
    shard = np.maximum(shard, 1)
    return (
        parameters * work.weight_bytes / np.where(work.zero == 3, shard, 1),
        parameters * work.gradient_bytes / np.where(work.zero >= 2, shard, 1),
        parameters * work.optimiser_bytes / np.where(work.zero >= 1, shard, 1),
    )


def layer_activation_bytes(work: Workload) -> Column:
    """Computes bytes of one layer and micro-batch on a device without recomputation.

    For a GPT these are s b h (10 + 24/t + 5 a s / h t).
    """
    whole = np.where(work.sequence_parallel > 0, 1 / work.tensor, 1.0)
    q, kv = work.heads * work.head_dim, np.maximum(work.kv_heads, work.tensor) * work.head_dim
    eight = work.recipe > 0  # the inputs of matrices are kept as one byte
    residual = np.where(eight, 6, 8) + 2 * work.dropout + 2 * _UNFUSED_NORM_BYTES * work.unfused_norms
    heads = (np.where(eight, 3, 4) * q + 4 * kv) / work.tensor
    # Experts keep their inputs and outputs, one of each for a copy of a token.
    copies = work.expert_layers * work.experts_each * (work.experts > 1) * 2 * _BF16_BYTES * work.hidden
    mlp = (2 * (work.mlp_matrices - 1) + np.where(eight, 1, 2)) * work.mlp_width_of_token + copies
    mlp = mlp / work.tensor
    scores = np.where(work.kernel < 2, 5 * work.heads * work.sequence / work.tensor, 0.0)
    return work.tokens * (residual * work.hidden * whole + heads + mlp + scores)


def kept_activation_bytes(work: Workload) -> Column:
    """Computes bytes of one layer and micro-batch that are kept from the forward to the backward pass."""
    scores = np.where(work.kernel < 2, 5 * work.heads * work.sequence / work.tensor, 0.0) * work.tokens
    whole = np.where(work.sequence_parallel > 0, 1 / work.tensor, 1.0)
    all_of_it = layer_activation_bytes(work) - work.attention_again * scores
    all_of_it = all_of_it * np.where(work.operators_again > 0, _OPERATORS_KEPT, 1.0)
    inputs = _BF16_BYTES * work.tokens * work.hidden * whole
    return work.layers_again * inputs + (1 - work.layers_again) * all_of_it
