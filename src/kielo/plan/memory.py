"""Bytes of a device while it trains: what is held between steps, exactly, and what a step adds; arithmetic, no torch.

Activations by Korthikanti et al. 2022 (arXiv:2205.05198, section 4, equations 1 to 6), written out for any widths of queries,
keys and MLP. For training as Kielo does it, `bytes.state_bytes` counts every parameter; here it is any engine's.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from kielo.plan.efficiency import ENGINES
from kielo.plan.workload import Workload

Column = np.ndarray
Kind = Literal["allocated", "reserved", "device"]
_BF16_BYTES = 2
# Of a logit: bf16 and fp32, where one kernel makes its gradient in place; with that apart, where none does; and with
# copies, where tensor ranks gather all of the vocabulary.
_LOGIT_BYTES, _PLAIN_LOGIT_BYTES, _WHOLE_LOGIT_BYTES = 6, 10, 20
_OPERATORS_KEPT = 0.55  # of a layer's activations, where every second matrix product is kept
# What a step holds beside what the formulas count: workspaces of kernels and of collectives, gathered gradients.
WORKSPACE_BYTES = 1.5e9
# Over what is allocated: what comes and goes leaves pieces; the driver's context and communicators.
RESERVED_SHARE, CONTEXT_BYTES = 0.06, 2.5e9
# Devices are sold by powers of ten and made by powers of two: of "80 GB", a driver has 79 × 2^30 bytes to give.
_DRIVER_SHARE = 0.99 * 2**30 / 1e9
_UNFUSED_NORM_BYTES = 10  # an element: fp32 copies of a norm's input and result that eager PyTorch keeps


@dataclass(frozen=True)
class MemoryBytes:
    """Columns [n], bytes of the rank that has most. `gathered` is what ZeRO-3 holds of other ranks' parameters."""

    weights: Column
    gradients: Column
    optimiser: Column
    activations: Column
    logits: Column
    gathered: Column

    @property
    def static(self) -> Column:
        """Between steps."""
        return self.weights + self.gradients + self.optimiser

    def peak(self, kind: Kind) -> Column:
        """Within a step, as each tool counts it: torch's max_memory_allocated, max_memory_reserved, or nvidia-smi."""
        passing = self.activations + self.logits + self.gathered
        if kind == "allocated":
            return self.static + passing + WORKSPACE_BYTES
        reserved = self.static + passing * (1 + RESERVED_SHARE) + WORKSPACE_BYTES
        return reserved + (CONTEXT_BYTES if kind == "device" else 0.0)


def usable_bytes(memory_bytes_of_card: float) -> float:
    """What a step's reserved bytes may reach on a device whose card says it was sold with so many."""
    return memory_bytes_of_card * _DRIVER_SHARE


def memory_bytes(work: Workload) -> MemoryBytes:
    """Of the first pipeline rank or the last, whichever peaks higher."""
    state = state_columns(work, work.parameters_of_heaviest_rank)
    layer, kept = layer_activation_bytes(work), kept_activation_bytes(work)
    layers, chunks = work.layers_of_heaviest_rank, work.chunks
    passes = np.where(
        chunks > 1, np.minimum(work.micro_batches * chunks, (chunks + 1) * work.pipeline - 1) / chunks,
        np.minimum(work.micro_batches, work.pipeline),
    )  # fmt: skip
    recomputed = np.where(work.layers_again > 0, layer, 0.0)  # one layer stands whole while its gradients are made
    first = passes * layers * kept + recomputed
    last_passes = np.where(chunks > 1, (np.minimum(work.micro_batches, work.pipeline) * (chunks - 1) + 1) / chunks, 1.0)
    last = last_passes * layers * kept + recomputed
    each = np.where(work.engine == ENGINES.index("megatron_te"), _LOGIT_BYTES, _PLAIN_LOGIT_BYTES)
    each = np.where(work.whole_logits > 0, _WHOLE_LOGIT_BYTES, each / work.tensor)
    logits = each * work.tokens * work.vocabulary
    # The last stage holds its logits while the first, with more passes, waits for gradients.
    first_peaks = (work.pipeline > 1) & (first >= last + logits)
    layer_bytes = work.layer_parameters / work.tensor * (_BF16_BYTES + work.gradient_bytes)
    gathered = np.where(
        (work.zero == 3) & (work.shard > 1), 2 * layer_bytes + _BF16_BYTES * work.vocabulary * work.hidden / work.tensor, 0.0
    )
    activations = np.where(first_peaks, first, last)
    return MemoryBytes(*state, activations, np.where(first_peaks, 0.0, logits), gathered)


def state_columns(work: Workload, parameters: Column) -> tuple[Column, Column, Column]:
    """(weights, gradients, optimiser) of `parameters` [n] on a device: (w + g + o / shard) bytes each, by ZeRO degree
    (Rajbhandari et al. 2020, arXiv:1910.02054, figure 1).
    """
    shard = np.maximum(work.shard, 1)
    return (
        parameters * work.weight_bytes / np.where(work.zero == 3, shard, 1),
        parameters * work.gradient_bytes / np.where(work.zero >= 2, shard, 1),
        parameters * work.optimiser_bytes / np.where(work.zero >= 1, shard, 1),
    )


def layer_activation_bytes(work: Workload) -> Column:
    """Of one layer and micro-batch on a device, nothing computed anew: s b h (10 + 24/t + 5 a s / h t) for a GPT."""
    whole = np.where(work.sequence_parallel > 0, 1 / work.tensor, 1.0)
    q, kv = work.heads * work.head_dim, np.maximum(work.kv_heads, work.tensor) * work.head_dim
    eight = work.recipe > 0  # the inputs of matrices are kept as one byte
    residual = np.where(eight, 6, 8) + 2 * work.dropout + 2 * _UNFUSED_NORM_BYTES * work.unfused_norms
    heads = (np.where(eight, 3, 4) * q + 4 * kv) / work.tensor
    mlp = (2 * (work.mlp_matrices - 1) + np.where(eight, 1, 2)) * work.ffn / work.tensor
    scores = np.where(work.kernel < 2, 5 * work.heads * work.sequence / work.tensor, 0.0)
    return work.tokens * (residual * work.hidden * whole + heads + mlp + scores)


def kept_activation_bytes(work: Workload) -> Column:
    """The same, of what is kept from forward to backward."""
    scores = np.where(work.kernel < 2, 5 * work.heads * work.sequence / work.tensor, 0.0) * work.tokens
    whole = np.where(work.sequence_parallel > 0, 1 / work.tensor, 1.0)
    all_of_it = layer_activation_bytes(work) - work.attention_again * scores
    all_of_it = all_of_it * np.where(work.operators_again > 0, _OPERATORS_KEPT, 1.0)
    inputs = _BF16_BYTES * work.tokens * work.hidden * whole
    return work.layers_again * inputs + (1 - work.layers_again) * all_of_it

