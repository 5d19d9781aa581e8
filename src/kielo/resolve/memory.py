"""Bytes of a device that Kielo trains on, and the only answer to "does it fit"; arithmetic, no torch.

`kielo plan`, `kielo rehearse`, the choice of micro-batches and the warning of `kielo train` all ask here. A
card has the bytes that the driver gives (`given_bytes`) and the part of them that context and communicators
take (`context_bytes`). `activation_bytes.memory_columns` counts what a layer keeps.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from kielo.recipe.cards import Accelerator
from kielo.recipe.optimisers import WIDENED_BYTES
from kielo.resolve.memory_row import MemoryColumns
from kielo.resolve.state_bytes import Bytes

# Bytes of a step that no formula counts: workspaces of kernels and of collectives, gathered gradients.
WORKSPACE_BYTES = 1.5e9
# Reserved beyond what is allocated, for fragments, as a share of the bytes that a step allocates and frees.
RESERVED_SHARE = 0.06
# Devices are sold in powers of ten and built in powers of two: of "80 GB" a driver gives about 79 × 2^30
# bytes.
_DRIVER_SHARE = 0.99 * 2**30 / 1e9


def usable_bytes(card: Accelerator) -> float | None:
    """Return the bytes that torch can reserve on a device, or None if its card has no memory."""
    if card.memory_bytes is None:
        return None
    return float(card.given_bytes or card.memory_bytes * _DRIVER_SHARE) - card.context_bytes


def workspace_bytes(passing: Bytes) -> Bytes:
    """Return the bytes that torch reserves beside tensors. passing: bytes that a step allocates and frees."""
    return WORKSPACE_BYTES + RESERVED_SHARE * passing


def needed_bytes(held: Bytes, peak: Bytes) -> Bytes:
    """Return the bytes that torch reserves. `held` bytes stay between steps. `peak` includes them."""
    return peak + workspace_bytes(peak - held)


Column = np.ndarray
Kind = Literal["rehearsed", "allocated", "reserved", "device"]
_FP32_BYTES = 4
_WHOLE_LOGITS = 3  # of a batch of questions: a rank's own, all ranks' in one tensor, and their sum
# Bytes of the driver's context and communicators in figures of nvidia-smi; a card has its own.
CONTEXT_BYTES = 2.5e9


@dataclass(frozen=True)
class MemoryBytes:
    """Columns [n] of bytes: parts of the peak of the fullest rank.

    `weights`, `gradients` and `optimiser` are held between steps. `gathered`: parameters that a step gathers
    from other ranks, and gradients that wait for the reduction. `logits`: with what tasks in training need
    beyond a step.
    """

    weights: Column
    gradients: Column
    optimiser: Column
    activations: Column
    logits: Column
    gathered: Column

    @property
    def static(self) -> Column:
        return self.weights + self.gradients + self.optimiser

    @property
    def passing(self) -> Column:
        return self.activations + self.logits + self.gathered

    def peak(self, kind: Kind) -> Column:
        """Return the peak within a step as a tool counts it.

        kind: tensors of a rehearsal, torch's max_memory_allocated, its max_memory_reserved, or nvidia-smi.
        """
        added = {"rehearsed": 0.0, "allocated": WORKSPACE_BYTES}.get(kind)
        if added is not None:
            return self.static + self.passing + added
        return self.static + self.passing + self.workspace + (CONTEXT_BYTES if kind == "device" else 0.0)

    @property
    def workspace(self) -> Column:
        """Return the bytes that torch reserves beside tensors: workspaces and fragments."""
        return workspace_bytes(self.passing)

    def parts(self) -> dict[str, Column]:
        """Return part → bytes, which sum to `peak("reserved")`."""
        return vars(self) | {"workspace": self.workspace}


def memory_bytes(work: MemoryColumns) -> MemoryBytes:
    """Compute the bytes of the first or the last pipeline rank, whichever peaks higher.

    FSDP2 splits fp32 parameters and moments in every ZeRO degree, which decides what a step has whole. Raises
    ValueError for trainings without the columns of `activation_bytes.memory_columns`.
    """
    if not np.all(work.compute_bytes > 0):
        raise ValueError("only Kielo's trainings have the columns that its bytes are counted from")
    first, last, is_last = _ends(work)
    return _chosen(is_last, last, first)


def scoring_bytes(work: MemoryColumns) -> Column:
    """Return the bytes that a forward pass without gradients reserves on the fullest rank."""
    is_last_too = work.last_parameters == 0
    first = _Rank(work, work.first_parameters, work.first_layers, work.first_passes, is_last_too, True)
    last = _Rank(work, work.last_parameters, work.last_layers, work.last_passes, ~is_last_too, False)
    return np.maximum(first.scoring_bytes(), np.where(is_last_too, 0.0, last.scoring_bytes()))


def is_last_fullest(work: MemoryColumns) -> Column:
    """Return True where the last pipeline rank peaks higher than the first, by tensors."""
    return _ends(work)[2]


def _ends(work: MemoryColumns) -> tuple[MemoryBytes, MemoryBytes, Column]:
    """Return (bytes of the first pipeline rank, of the last, True where the last peaks higher)."""
    is_last_too = work.last_parameters == 0
    first = _Rank(
        work, work.first_parameters, work.first_layers, work.first_passes, is_last_too, True
    ).bytes()
    last = _Rank(work, work.last_parameters, work.last_layers, work.last_passes, ~is_last_too, False).bytes()
    return first, last, ~is_last_too & (last.peak("rehearsed") > first.peak("rehearsed"))


@dataclass(frozen=True)
class _Rank:
    """A pipeline rank with its `parameters`, its `layers` and the `passes` through one of its stages at once.

    benchmarks/planner/planner_memory.py compares its bytes with rehearsals.
    """

    work: MemoryColumns
    parameters: Column
    layers: Column
    passes: Column
    has_head: Column
    has_embed: bool

    def bytes(self) -> MemoryBytes:
        work, parameters, shard = self.work, self.parameters, self.shard
        # The copy of a tied embedding has no moments.
        copy = self.head * (self.is_pipeline & (work.tied > 0))
        weights, held, optimiser = (
            _FP32_BYTES * parameters / shard,
            self.shards,
            work.optimiser_bytes * (self.trained - copy) / shard,
        )
        times = self.bytes_at_times()
        at = np.argmax([sum(parts[1:], parts[0]) for parts in times], axis=0)
        gradients, gathered, activations, logits = (
            np.choose(at, [parts[part] for parts in times]) for part in range(4)
        )
        # Shards of gradients count as held between steps. If the peak is before them, the bytes that it has
        # in their place are not counted again.
        whole = gathered + np.maximum(gradients - held, 0.0)
        missing, passing = np.maximum(held - gradients, 0.0), whole + activations + logits
        share = np.maximum(passing - missing, 0.0) / np.maximum(passing, 1.0)
        more = np.maximum(self.asking_bytes() - share * passing, 0.0)
        return MemoryBytes(
            weights, held, optimiser, share * activations, share * logits + more, share * whole
        )

    def bytes_at_times(self) -> list[tuple[Column, Column, Column, Column]]:
        """Return (gradients, gathered parameters, activations, logits) at each time that can be the peak."""
        work, bytes_per_element, zero = self.work, self.work.compute_bytes, np.zeros(len(self.work))
        waiting, kept = self.waiting, self.activations
        gathered, own = work.gathered_bytes, self.own_head
        # The current layer and the next. The next of another stage waits for that stage's next pass.
        two_layers = np.where(work.zero == 3, (1 + work.chunks) * gathered * self.layer, 0.0)
        elsewhere = np.where(work.zero == 3, (work.chunks - 1) * gathered * self.layer, 0.0)
        parameters = self.root * bytes_per_element + np.where(
            work.zero == 3, 0.0, gathered * (self.parameters - self.root)
        )
        # A head of its own is freed after its loss, at degrees 1 and 2 in the last micro-batch.
        soon = (work.zero == 3) | ((work.micro_batches < 3) & ~self.is_pipeline)
        after = parameters - bytes_per_element * own * soon
        late = np.where(self.reduces_at_end, 0.0, own)
        # Gradients of the current layer, and of the head: as computed, or in its reduction.
        is_trained = 1.0 - work.frozen
        mlp = is_trained * bytes_per_element * work.mlp_matrices * work.hidden * work.ffn / work.tensor
        unreduced = np.where(bytes_per_element < _FP32_BYTES, bytes_per_element * (self.head - own), 0.0)
        is_reduced = ~self.waits_whole | (work.micro_batches == 1)
        # The reduction of the head frees the buffer of the reduction before it.
        made = mlp + unreduced + is_reduced * work.reduce_bytes * own - (own > 0) * self.root_buffer
        again, a_layer = work.tokens * work.again_bytes, work.tokens * work.kept_bytes
        a_pass = a_layer * self.layers / work.chunks
        # If all forward passes come before the first gradients, a pass has ended by then.
        all_first = self.passes >= work.micro_batches * work.chunks
        none_yet = np.where(all_first, 0.0, waiting)
        # Reduction of the last micro-batch: a layer's gradients, whole and copied for the reduction, while
        # the layer before it computes its own.
        wait_whole = self.waits_whole & (work.micro_batches > 1)
        reduced_late = np.where(wait_whole, waiting, self.shards * (work.micro_batches > 1))
        reduced_late = (
            reduced_late
            + self.stage_buffers
            + is_trained * work.reduce_bytes * self.layer
            - np.where(wait_whole, _FP32_BYTES * late * (1 - 1 / self.shard), 0.0)
            + np.where(
                self.reduces_at_end,
                0.0,
                bytes_per_element * (self.head - own) + np.where(wait_whole, 0.0, mlp),
            )
        )
        others = np.where(self.is_pipeline, kept - a_pass, 0.0)  # passes beside the pass that ends
        rest = np.where(
            self.reduces_at_end, 0.0, others + a_pass - a_layer + np.where(wait_whole, 0.0, again)
        )
        ends = bytes_per_element * (self.embedding + self.head - late) + _FP32_BYTES * late / self.shard
        return [
            (none_yet, parameters + elsewhere, kept, self.losses),
            (none_yet + made, after + two_layers, kept + again, zero),
            (waiting + made, after + two_layers, kept - all_first * a_pass + again, zero),
            (waiting + bytes_per_element * self.embedding, after + elsewhere, kept - a_pass, zero),
            (
                reduced_late,
                parameters
                - bytes_per_element * late
                + np.where(work.zero == 3, two_layers, -gathered * self.layer),
                rest,
                zero,
            ),
            (
                is_trained * (_FP32_BYTES * self.layers / self.shard + work.reduce_bytes) * self.layer + ends,
                bytes_per_element * (self.root - late),
                zero,
                zero,
            ),
            (self.shards + _FP32_BYTES * (self.root - late) * (self.shard == 1), self.widened, zero, zero),
        ]

    def scoring_bytes(self) -> Column:
        """Return the bytes that a pass without gradients reserves. It keeps no layer's activations.

        With `asked_tokens` that is a pass over windows of text or over questions, whichever needs more.
        """
        work = self.work
        weights = _FP32_BYTES * self.parameters / self.shard
        tokens = np.minimum(work.tokens, np.where(work.loss_tokens > 0, work.loss_tokens, np.inf))
        columns = tokens * work.vocabulary / work.tensor
        logits = self.has_head * (work.compute_bytes + 2 * _FP32_BYTES) * columns
        passing = np.maximum(self._forward_bytes(work.tokens, logits), self.asking_bytes())
        return weights + passing + workspace_bytes(passing)

    def asking_bytes(self) -> Column:
        """Return the bytes that tasks in training allocate and free: a forward pass, and whole logits."""
        work = self.work
        logits = _WHOLE_LOGITS * _FP32_BYTES * work.asked_tokens * work.vocabulary
        return np.where(work.asked_tokens > 0, self._forward_bytes(work.asked_tokens, logits), 0.0)

    def _forward_bytes(self, tokens: Column, logits: Column) -> Column:
        """Return the bytes of a forward pass without gradients. It has `logits` after its last layer."""
        work = self.work
        of_layers = np.where(work.zero == 3, 2 * self.layer, self.parameters - self.root)
        gathered = self.root * work.compute_bytes + work.gathered_bytes * of_layers
        hidden = 4 * tokens * work.hidden * work.compute_bytes
        a_layer = tokens * (work.kept_bytes + work.again_bytes) + work.mask_bytes
        return gathered + hidden + np.maximum(a_layer, logits)

    @cached_property
    def shard(self) -> Column:
        return np.maximum(self.work.shard, 1)

    @cached_property
    def is_pipeline(self) -> Column:
        return self.work.pipeline > 1

    @cached_property
    def layer(self) -> Column:
        return self.work.layer_elements

    @cached_property
    def root(self) -> Column:
        """Return the parameters of embedding and head, whole while the loss is computed."""
        return self.parameters - self.layers * self.layer

    @cached_property
    def head(self) -> Column:
        return self.has_head * self.work.vocabulary * self.work.hidden / self.work.tensor

    @cached_property
    def own_head(self) -> Column:
        """Return the parameters of an untied head, which is gathered and reduced by itself."""
        return self.head * (self.work.tied == 0)

    @cached_property
    def embedding(self) -> Column:
        """Return the parameters of the embedding's rows on a tensor rank, which have gradients there too."""
        return self.has_embed * self.work.vocabulary * self.work.hidden / self.work.tensor

    @cached_property
    def trained(self) -> Column:
        return self.parameters - self.work.frozen * self.layers * self.layer

    @cached_property
    def shards(self) -> Column:
        return _FP32_BYTES * self.trained / self.shard

    @cached_property
    def widened(self) -> Column:
        """Return the temporary fp32 bytes of the optimiser's step."""
        work = self.work
        widened = np.minimum(work.widened_bytes * self.trained / self.shard, WIDENED_BYTES)
        matrix = (1.0 - work.frozen) * work.hidden * work.ffn / work.tensor
        largest = np.maximum(np.maximum(self.embedding, self.head), matrix)
        return np.maximum(work.whole_update_bytes * largest / self.shard, widened)

    @cached_property
    def waits_whole(self) -> Column:
        """Return True where gradients wait whole for the last micro-batch."""
        return (self.work.zero == 1) | (self.work.splits_backward > 0)

    @cached_property
    def reduces_at_end(self) -> Column:
        """Return True where gradients are reduced after all passes: pipelines whose gradients wait whole."""
        return self.is_pipeline & self.waits_whole

    @cached_property
    def root_buffer(self) -> Column:
        """Return the bytes of an earlier micro-batch's last reduction, the root's, until the next."""
        work = self.work
        return np.where(self.waits_whole, 0.0, work.reduce_bytes * (self.root - self.own_head)) * (
            work.micro_batches > 1
        )

    @cached_property
    def stage_buffers(self) -> Column:
        """Return the bytes of the last reductions of the rank's other stages.

        FSDP2 keeps the buffer of a stage's last reduction, a layer's, until that stage reduces again.
        """
        work = self.work
        a_layer = (1.0 - work.frozen) * work.reduce_bytes * self.layer
        return np.where(self.waits_whole, 0.0, (work.chunks - 1) * a_layer) * (work.micro_batches > 1)

    @cached_property
    def waiting(self) -> Column:
        """Return the bytes of earlier micro-batches' gradients.

        A split backward pass keeps the gradients of a stage and of the head as computed until both parts are
        done.
        """
        work = self.work
        whole = _FP32_BYTES * self.trained
        waiting = np.where(self.waits_whole, whole, self.shards) * (work.micro_batches > 1)
        return (
            waiting
            + self.root_buffer
            + self.stage_buffers
            + work.splits_backward
            * work.compute_bytes
            * ((1.0 - work.frozen) * self.layers / work.chunks * self.layer + self.head)
        )

    @cached_property
    def activations(self) -> Column:
        """Return the bytes of current passes, of hidden states at the end, and of tensors for neighbours.

        Hidden states at the end: the last norm's and, whole, before and after the head. A received activation
        is what its pass keeps, so only arriving gradients have buffers: one for each stage that has a next
        stage. torch keeps a sent activation until the backward of its pass.
        """
        work = self.work
        elements, parts = work.tokens * work.hidden, np.where(work.sequence_parallel > 0, work.tensor, 1)
        split = elements / parts * work.compute_bytes
        ends = split + self.has_head * (split + elements * (_FP32_BYTES / parts + 2 * work.compute_bytes))
        passes = np.minimum(self.passes, work.micro_batches * work.chunks)
        # Each pass of GPipe's last stage keeps the head's gradient of its tokens.
        waiting = np.where(np.isinf(self.passes) & (self.has_head > 0), work.micro_batches - 1, 0)
        buffers = (work.chunks - self.has_head) * self.is_pipeline
        kept = passes * (self.layers / work.chunks * work.tokens * work.kept_bytes + work.mask_bytes)
        sent = passes * buffers / work.chunks
        return kept + ends + waiting * (_FP32_BYTES * self.head + ends) + (buffers + sent) * split

    @cached_property
    def losses(self) -> Column:
        """Return the bytes of a chunk's logits and of the head's gradient, summed in fp32 over the chunks."""
        work, bytes_per_element = self.work, self.work.compute_bytes
        tokens = np.minimum(work.tokens, np.where(work.loss_tokens > 0, work.loss_tokens, np.inf))
        logit = work.logit_bytes + bytes_per_element * (work.tokens > tokens)  # with the chunk before
        columns = tokens * work.vocabulary / work.tensor
        product = np.where(bytes_per_element < _FP32_BYTES, bytes_per_element * self.head, 0.0)
        rounded = 2 * work.head_in_recipe * self.head  # the weight in 8 bits, by rows and by columns
        return _FP32_BYTES * self.head + self.has_head * (
            rounded + np.maximum(logit * columns, product + bytes_per_element * columns)
        )


def _chosen(condition: Column, one: MemoryBytes, other: MemoryBytes) -> MemoryBytes:
    return MemoryBytes(
        *(np.where(condition, a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))
    )
