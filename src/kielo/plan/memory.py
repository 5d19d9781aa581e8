"""Bytes of a device while it trains: what is held between steps, exactly, and what a step adds; arithmetic,
no torch.

Activations by Korthikanti et al. 2022 (arXiv:2205.05198, section 4, equations 1 to 6), written out for any
widths of queries, keys and MLP. That is any engine's training; what Kielo's own keeps is told by
`bytes.own_columns`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from kielo.plan.efficiency import ENGINES
from kielo.plan.workload import Workload
from kielo.resolve.state_bytes import WIDENED_BYTES

Column = np.ndarray
Kind = Literal["rehearsed", "allocated", "reserved", "device"]
_BF16_BYTES, _FP32_BYTES = 2, 4
# Of a logit: bf16 and fp32, where one kernel makes its gradient in place; with that apart, where none does;
# and with copies, where tensor ranks gather all of the vocabulary.
_LOGIT_BYTES, _PLAIN_LOGIT_BYTES, _WHOLE_LOGIT_BYTES = 6, 10, 20
_OPERATORS_KEPT = 0.55  # of a layer's activations, where every second matrix product is kept
# What a step holds beside what the formulas count: workspaces of kernels and of collectives, gathered
# gradients.
WORKSPACE_BYTES = 1.5e9
# Over what is allocated: what comes and goes leaves pieces; the driver's context and communicators.
RESERVED_SHARE, CONTEXT_BYTES = 0.06, 2.5e9
# Devices are sold by powers of ten and made by powers of two: of "80 GB", a driver has 79 × 2^30 bytes to
# give.
_DRIVER_SHARE = 0.99 * 2**30 / 1e9
_UNFUSED_NORM_BYTES = 10  # an element: fp32 copies of a norm's input and result that eager PyTorch keeps


@dataclass(frozen=True)
class MemoryBytes:
    """Columns [n], bytes of the rank that has most: parts of its peak. `weights`, `gradients` and `optimiser`
    are as they are between steps; `gathered` is what a step makes whole of other ranks' parameters, and
    gradients that wait for that.
    """

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

    @property
    def passing(self) -> Column:
        """What comes and goes within a step."""
        return self.activations + self.logits + self.gathered

    def peak(self, kind: Kind) -> Column:
        """Within a step, as each tool counts it: tensors as in a rehearsal, torch's max_memory_allocated,
        max_memory_reserved, or nvidia-smi.
        """
        added = {"rehearsed": 0.0, "allocated": WORKSPACE_BYTES}.get(kind)
        if added is not None:
            return self.static + self.passing + added
        return self.static + self.passing + self.workspace + (CONTEXT_BYTES if kind == "device" else 0.0)

    @property
    def workspace(self) -> Column:
        """What torch reserves beside tensors: workspaces, and pieces that what comes and goes leaves."""
        return WORKSPACE_BYTES + RESERVED_SHARE * self.passing

    def parts(self) -> dict[str, Column]:
        """Part → bytes; they add up to `peak("reserved")`."""
        return vars(self) | {"workspace": self.workspace}


def usable_bytes(memory_bytes_of_card: float) -> float:
    """What a step's reserved bytes may reach on a device whose card says it was sold with so many."""
    return memory_bytes_of_card * _DRIVER_SHARE


def memory_bytes(work: Workload) -> MemoryBytes:
    """Of the first pipeline rank or the last, whichever peaks higher."""
    own = work.compute_bytes > 0
    if own.all():
        return _of_kielo(work)
    return _by_formulas(work) if not own.any() else _chosen(own, _of_kielo(work), _by_formulas(work))


def _by_formulas(work: Workload) -> MemoryBytes:
    """Of engines other than Kielo."""
    state = state_columns(work, work.parameters_of_heaviest_rank)
    layer, kept = layer_activation_bytes(work), kept_activation_bytes(work)
    layers, chunks = work.layers_of_heaviest_rank, work.chunks
    passes = np.where(
        chunks > 1, np.minimum(work.micro_batches * chunks, (chunks + 1) * work.pipeline - 1) / chunks,
        np.minimum(work.micro_batches, work.pipeline),
    )  # fmt: skip
    # one layer stands whole while its gradients are made
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
    layer_bytes = work.layer_parameters / work.tensor * (_BF16_BYTES + work.gradient_bytes)
    gathered = np.where(
        (work.zero == 3) & (work.shard > 1),
        2 * layer_bytes + _BF16_BYTES * work.vocabulary * work.hidden / work.tensor,
        0.0,
    )
    activations = np.where(first_peaks, first, last)
    return MemoryBytes(*state, activations, np.where(first_peaks, 0.0, logits), gathered)


def _of_kielo(work: Workload) -> MemoryBytes:
    """Of Kielo: fp32 parameters, and moments, split by FSDP2 whatever the ZeRO degree, which says what a step
    has whole.
    """
    is_last_too = work.last_parameters == 0
    first = _Rank(
        work, work.first_parameters, work.first_layers, work.first_passes, is_last_too, True
    ).bytes()
    last = _Rank(work, work.last_parameters, work.last_layers, work.last_passes, ~is_last_too, False).bytes()
    return _chosen(~is_last_too & (last.peak("rehearsed") > first.peak("rehearsed")), last, first)


@dataclass(frozen=True)
class _Rank:
    """A pipeline rank of Kielo: `parameters` and `layers` on it, `passes` through one of its stages under way
    at once.

    Held against rehearsals by benchmarks/planner_memory.py.
    """

    work: Workload
    parameters: Column
    layers: Column
    passes: Column
    has_head: Column
    has_embed: bool

    def bytes(self) -> MemoryBytes:
        work, parameters, shard = self.work, self.parameters, self.shard
        # of a tied embedding, which no one optimises
        copy = self.head * (self.is_pipeline & (work.tied > 0))
        weights, optimiser = (
            _FP32_BYTES * parameters / shard,
            work.optimiser_bytes * (parameters - copy) / shard,
        )
        moments = self.moments()
        at = np.argmax([sum(moment) for moment in moments], axis=0)
        gradients, gathered, activations, logits = (
            np.choose(at, [moment[part] for moment in moments]) for part in range(4)
        )
        # Shards of gradients count as held between steps; where they are made after the peak, what is there
        # in their place does not come on top of them.
        whole = gathered + np.maximum(gradients - weights, 0.0)
        missing, passing = np.maximum(weights - gradients, 0.0), whole + activations + logits
        share = np.maximum(passing - missing, 0.0) / np.maximum(passing, 1.0)
        return MemoryBytes(weights, weights, optimiser, share * activations, share * logits, share * whole)

    def moments(self) -> list[tuple[Column, Column, Column, Column]]:
        """(gradients, gathered parameters, activations, logits) at each time at which there may be most."""
        work, number, zero = self.work, self.work.compute_bytes, np.zeros(len(self.work))
        waiting, kept = self.waiting, self.activations
        gathered = work.gathered_bytes
        two_layers = np.where(work.zero == 3, 2 * gathered * self.layer, 0.0)  # one and the next
        parameters = self.root * number + np.where(
            work.zero == 3, 0.0, gathered * (self.parameters - self.root)
        )
        # Made by the layer at hand and by the head, and not yet added to those in fp32.
        mlp = number * work.mlp_matrices * work.hidden * work.ffn / work.tensor
        made = mlp + np.where(number < _FP32_BYTES, number * self.head, 0.0)
        again, a_layer = work.tokens * work.again_bytes, work.tokens * work.kept_bytes
        a_pass = a_layer * self.layers / work.chunks
        # Where all passes are under way before the first gradients are there, one is over when they are.
        all_first = self.passes >= work.micro_batches * work.chunks
        none_yet = np.where(all_first, 0.0, waiting)
        # When the last micro-batch is reduced: a layer's gradients, whole and once more to reduce from, while
        # the layer before it makes its own. Pipelines reduce when all passes are done.
        wait_whole = self.waits_whole & (work.micro_batches > 1)
        reduced_late = np.where(wait_whole, waiting, self.shards * (work.micro_batches > 1))
        reduced_late = (
            reduced_late
            + _FP32_BYTES * self.layer
            + np.where(self.is_pipeline, 0.0, number * self.head + np.where(wait_whole, 0.0, mlp))
        )
        rest = np.where(self.is_pipeline, 0.0, a_pass - a_layer + np.where(wait_whole, 0.0, again))
        tables = number * (self.table_gradient + self.head)
        return [
            (none_yet, parameters, kept, self.losses),
            (none_yet + made, parameters + two_layers, kept + again, zero),
            (waiting + made, parameters + two_layers, kept - all_first * a_pass + again, zero),
            (waiting + number * self.table_gradient, parameters, kept - a_pass, zero),
            (
                reduced_late,
                parameters + np.where(work.zero == 3, two_layers, -gathered * self.layer),
                rest,
                zero,
            ),
            (
                _FP32_BYTES * (self.layers / self.shard + 1) * self.layer + tables,
                number * self.root,
                zero,
                zero,
            ),
            (self.shards + _FP32_BYTES * self.root * (self.shard == 1), self.widened, zero, zero),
        ]

    @cached_property
    def shard(self) -> Column:
        return np.maximum(self.work.shard, 1)

    @cached_property
    def is_pipeline(self) -> Column:
        return self.work.pipeline > 1

    @cached_property
    def layer(self) -> Column:
        """Parameters of one layer."""
        return self.work.layer_parameters / self.work.tensor

    @cached_property
    def root(self) -> Column:
        """Those of embedding and head, which are whole from the first forward to the last backward."""
        return self.parameters - self.layers * self.layer

    @cached_property
    def head(self) -> Column:
        return self.has_head * self.work.vocabulary * self.work.hidden / self.work.tensor

    @cached_property
    def table_gradient(self) -> Column:
        """Elements: torch's DTensor gives each tensor rank the gradient of the whole embedding, cut when
        it is reduced or, where head and table are one, added to that of the head.
        """
        parts = np.where((self.work.tied > 0) & ~self.is_pipeline, self.work.tensor, 1)
        return self.has_embed * self.work.vocabulary * self.work.hidden / parts

    @cached_property
    def shards(self) -> Column:
        """Reduced gradients."""
        return _FP32_BYTES * self.parameters / self.shard

    @cached_property
    def widened(self) -> Column:
        """Moments that the optimiser's step has in fp32 beside those that are kept in bf16."""
        wide = 2 * _FP32_BYTES
        return np.where(
            self.work.optimiser_bytes < wide,
            np.minimum(wide * self.parameters / self.shard, WIDENED_BYTES),
            0.0,
        )

    @cached_property
    def waits_whole(self) -> Column:
        """Do gradients wait whole for the last micro-batch? In torch's pipelines whatever the ZeRO degree."""
        return (self.work.zero == 1) | self.is_pipeline

    @cached_property
    def waiting(self) -> Column:
        """Gradients of earlier micro-batches. Of shards the buffer of the last reduction, the root's, lives
        until the next.

        A backward pass that is taken apart leaves a stage's gradients, and the head's, as they were made
        until both parts are done.
        """
        work = self.work
        table = work.vocabulary * work.hidden / work.tensor * self.has_embed
        whole = _FP32_BYTES * (self.parameters + self.table_gradient - table)
        waiting = np.where(self.waits_whole, whole, self.shards + _FP32_BYTES * self.root) * (
            work.micro_batches > 1
        )
        return waiting + work.splits_backward * work.compute_bytes * (
            self.layers / work.chunks * self.layer + self.head
        )

    @cached_property
    def activations(self) -> Column:
        """Of passes under way, hidden states at the end (the last norm's and, whole, before and after the
        head), and buffers for what neighbours send, of which torch makes one for each micro-batch when the
        schedule is made.
        """
        work = self.work
        elements, parts = work.tokens * work.hidden, np.where(work.sequence_parallel > 0, work.tensor, 1)
        split = elements / parts * work.compute_bytes
        ends = split + self.has_head * (split + elements * (_FP32_BYTES / parts + 2 * work.compute_bytes))
        under_way = np.minimum(self.passes, work.micro_batches * work.chunks) * self.layers / work.chunks
        # The passes of GPipe's last stage each wait with the head's gradient of their tokens.
        waiting = np.where(np.isinf(self.passes) & (self.has_head > 0), work.micro_batches - 1, 0)
        both_ends = self.has_head & self.is_pipeline & self.has_embed
        buffers = np.where(both_ends, 2, 2 * work.chunks - 1) * work.micro_batches * self.is_pipeline
        kept = under_way * work.tokens * work.kept_bytes
        return kept + ends + waiting * (_FP32_BYTES * self.head + ends) + buffers * split

    @cached_property
    def losses(self) -> Column:
        """Logits of a chunk of tokens, and the head's gradient: summed in fp32 over the chunks, and one
        product of it.
        """
        work, number = self.work, self.work.compute_bytes
        tokens = np.minimum(work.tokens, np.where(work.loss_tokens > 0, work.loss_tokens, np.inf))
        logit = work.logit_bytes + number * (work.tokens > tokens)  # the chunk's before
        columns = tokens * work.vocabulary / work.tensor
        product = np.where(number < _FP32_BYTES, number * self.head, 0.0)
        return _FP32_BYTES * self.head + self.has_head * np.maximum(
            logit * columns, product + number * columns
        )


def _chosen(condition: Column, one: MemoryBytes, other: MemoryBytes) -> MemoryBytes:
    """`one` where the condition holds."""
    return MemoryBytes(*(np.where(condition, a, b) for a, b in zip(vars(one).values(), vars(other).values())))


def state_columns(work: Workload, parameters: Column) -> tuple[Column, Column, Column]:
    """(weights, gradients, optimiser) of `parameters` [n] on a device: (w + g + o / shard) bytes each, by
    ZeRO degree (Rajbhandari et al. 2020, arXiv:1910.02054, figure 1).
    """
    shard = np.maximum(work.shard, 1)
    return (
        parameters * work.weight_bytes / np.where(work.zero == 3, shard, 1),
        parameters * work.gradient_bytes / np.where(work.zero >= 2, shard, 1),
        parameters * work.optimiser_bytes / np.where(work.zero >= 1, shard, 1),
    )


def layer_activation_bytes(work: Workload) -> Column:
    """Of one layer and micro-batch on a device, nothing computed anew: s b h (10 + 24/t + 5 a s / h t) for a
    GPT.
    """
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
