"""Bytes of a device that Kielo trains on, and the one answer to "does it fit"; arithmetic, no torch."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from kielo.recipe.cards import Accelerator
from kielo.recipe.optimisers import WIDENED_BYTES
from kielo.resolve.memory_row import MemoryColumns
from kielo.resolve.state_bytes import Bytes

# The one answer to "does it fit": bytes that a step may reserve on a device, and those it needs; no torch.
#
# `kielo plan`, `kielo rehearse`, the choice of micro-batches and the warning of `kielo train` all ask here.
# A card says what the driver gives (`given_bytes`) and what of it context and communicators take
# (`context_bytes`); the allocator's share goes with what a step allocates and frees.


# Bytes of a step that no formula counts: workspaces of kernels and of collectives, gathered gradients.
WORKSPACE_BYTES = 1.5e9
# Reserved beyond what is allocated: fragments of the allocator, as a share of what a step allocates and
# frees.
RESERVED_SHARE = 0.06
# Devices are sold by powers of ten and built by powers of two: of "80 GB" a driver gives about 79 × 2^30
# bytes.
_DRIVER_SHARE = 0.99 * 2**30 / 1e9


def usable_bytes(card: Accelerator) -> float | None:
    """Return the bytes that torch may reserve on a device; None where its card knows of no memory."""
    if card.memory_bytes is None:
        return None
    return float(card.given_bytes or card.memory_bytes * _DRIVER_SHARE) - card.context_bytes


def workspace_bytes(passing: Bytes) -> Bytes:
    """Return what torch reserves beside tensors, of which a step allocates and frees `passing` bytes."""
    return WORKSPACE_BYTES + RESERVED_SHARE * passing


def needed_bytes(held: Bytes, peak: Bytes) -> Bytes:
    """Return the bytes that torch reserves, from those of tensors.

    held: between steps. peak: at one time within a step, with those.
    """
    return peak + workspace_bytes(peak - held)


# Bytes of a device that Kielo trains on: exactly between steps, and what a step adds; arithmetic, no torch.
#
# `activation_bytes.memory_columns` counts what a layer keeps. Bytes of other engines, by formulas of
# papers, are in benchmarks/planner/published_memory.py.


Column = np.ndarray
Kind = Literal["rehearsed", "allocated", "reserved", "device"]
_FP32_BYTES = 4
# Of the driver's context and of communicators, in figures of nvidia-smi; a card has its own.
CONTEXT_BYTES = 2.5e9


@dataclass(frozen=True)
class MemoryBytes:
    """Columns [n] of bytes: the parts of the peak of the rank that has most.

    `weights`, `gradients` and `optimiser` are held between steps. `gathered` are parameters that a step
    gathers from other ranks, and gradients that wait to be reduced.
    """

    weights: Column
    gradients: Column
    optimiser: Column
    activations: Column
    logits: Column
    gathered: Column

    @property
    def static(self) -> Column:
        """Bytes held between steps."""
        return self.weights + self.gradients + self.optimiser

    @property
    def passing(self) -> Column:
        """Bytes that a step allocates and frees."""
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
        """Bytes that torch reserves beside tensors: workspaces and fragments of the allocator."""
        return workspace_bytes(self.passing)

    def parts(self) -> dict[str, Column]:
        """Return part → bytes; they add up to `peak("reserved")`."""
        return vars(self) | {"workspace": self.workspace}


def memory_bytes(work: MemoryColumns) -> MemoryBytes:
    """Compute the bytes of the first pipeline rank or of the last, whichever peaks higher.

    FSDP2 splits fp32 parameters and moments whatever the ZeRO degree, which decides what a step holds whole.
    Raises ValueError for trainings without the columns of `activation_bytes.memory_columns`.
    """
    if not np.all(work.compute_bytes > 0):
        raise ValueError("only trainings of Kielo have the columns that its bytes are counted from")
    first, last, is_last = _ends(work)
    return _chosen(is_last, last, first)


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
    """A pipeline rank: `parameters` and `layers` on it, `passes` through one of its stages under way at once.

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
        # of a tied embedding, which has no moments
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
        # Shards of gradients count as held between steps. Where the peak comes before them, the bytes that it
        # holds in their place are not counted a second time.
        whole = gathered + np.maximum(gradients - held, 0.0)
        missing, passing = np.maximum(held - gradients, 0.0), whole + activations + logits
        share = np.maximum(passing - missing, 0.0) / np.maximum(passing, 1.0)
        return MemoryBytes(weights, held, optimiser, share * activations, share * logits, share * whole)

    def bytes_at_times(self) -> list[tuple[Column, Column, Column, Column]]:
        """Return (gradients, gathered parameters, activations, logits) at each time that may be the peak."""
        work, bytes_per_element, zero = self.work, self.work.compute_bytes, np.zeros(len(self.work))
        waiting, kept = self.waiting, self.activations
        gathered = work.gathered_bytes
        two_layers = np.where(work.zero == 3, 2 * gathered * self.layer, 0.0)  # one and the next
        parameters = self.root * bytes_per_element + np.where(
            work.zero == 3, 0.0, gathered * (self.parameters - self.root)
        )
        # Gradients of the current layer and of the head that are not yet added to those in fp32.
        is_trained = 1.0 - work.frozen
        mlp = is_trained * bytes_per_element * work.mlp_matrices * work.hidden * work.ffn / work.tensor
        made = mlp + np.where(bytes_per_element < _FP32_BYTES, bytes_per_element * self.head, 0.0)
        again, a_layer = work.tokens * work.again_bytes, work.tokens * work.kept_bytes
        a_pass = a_layer * self.layers / work.chunks
        # Where all forward passes come before the first gradients, one pass is over when those are computed.
        all_first = self.passes >= work.micro_batches * work.chunks
        none_yet = np.where(all_first, 0.0, waiting)
        # While the last micro-batch is reduced: a layer's gradients, whole and copied to be reduced, while
        # the layer before it computes its own.
        wait_whole = self.waits_whole & (work.micro_batches > 1)
        reduced_late = np.where(wait_whole, waiting, self.shards * (work.micro_batches > 1))
        reduced_late = (
            reduced_late
            + is_trained * work.reduce_bytes * self.layer
            + np.where(
                self.reduces_at_end, 0.0, bytes_per_element * self.head + np.where(wait_whole, 0.0, mlp)
            )
        )
        others = np.where(self.is_pipeline, kept - a_pass, 0.0)  # passes under way beside the one that ends
        rest = np.where(
            self.reduces_at_end, 0.0, others + a_pass - a_layer + np.where(wait_whole, 0.0, again)
        )
        ends = bytes_per_element * (self.embedding + self.head)
        return [
            (none_yet, parameters, kept, self.losses),
            (none_yet + made, parameters + two_layers, kept + again, zero),
            (waiting + made, parameters + two_layers, kept - all_first * a_pass + again, zero),
            (waiting + bytes_per_element * self.embedding, parameters, kept - a_pass, zero),
            (
                reduced_late,
                parameters + np.where(work.zero == 3, two_layers, -gathered * self.layer),
                rest,
                zero,
            ),
            (
                is_trained * (_FP32_BYTES * self.layers / self.shard + work.reduce_bytes) * self.layer + ends,
                bytes_per_element * self.root,
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
        return self.work.layer_elements

    @cached_property
    def root(self) -> Column:
        """Parameters of embedding and head, which are whole from the first forward to the last backward."""
        return self.parameters - self.layers * self.layer

    @cached_property
    def head(self) -> Column:
        return self.has_head * self.work.vocabulary * self.work.hidden / self.work.tensor

    @cached_property
    def embedding(self) -> Column:
        """Parameters of the embedding on a tensor rank: its own rows, of which it has the gradient too."""
        return self.has_embed * self.work.vocabulary * self.work.hidden / self.work.tensor

    @cached_property
    def trained(self) -> Column:
        """Parameters with gradients: those of frozen layers have none."""
        return self.parameters - self.work.frozen * self.layers * self.layer

    @cached_property
    def shards(self) -> Column:
        """Bytes of reduced gradients."""
        return _FP32_BYTES * self.trained / self.shard

    @cached_property
    def widened(self) -> Column:
        """Bytes in fp32 that the optimiser's step has beside what is kept."""
        work = self.work
        widened = np.minimum(work.widened_bytes * self.trained / self.shard, WIDENED_BYTES)
        matrix = (1.0 - work.frozen) * work.hidden * work.ffn / work.tensor
        largest = np.maximum(np.maximum(self.embedding, self.head), matrix)
        return np.maximum(work.whole_update_bytes * largest / self.shard, widened)

    @cached_property
    def waits_whole(self) -> Column:
        """True where gradients wait whole for the last micro-batch."""
        return (self.work.zero == 1) | (self.work.splits_backward > 0)

    @cached_property
    def reduces_at_end(self) -> Column:
        """True where gradients are reduced after all passes: pipelines whose gradients wait whole."""
        return self.is_pipeline & self.waits_whole

    @cached_property
    def waiting(self) -> Column:
        """Bytes of the gradients of earlier micro-batches.

        Where these are shards, the buffer of the last reduction, the root's, lives until the next one. A
        split backward pass keeps a stage's gradients, and the head's, as computed until both of its parts are
        done.
        """
        work = self.work
        whole = _FP32_BYTES * self.trained
        waiting = np.where(self.waits_whole, whole, self.shards + work.reduce_bytes * self.root) * (
            work.micro_batches > 1
        )
        return waiting + work.splits_backward * work.compute_bytes * (
            (1.0 - work.frozen) * self.layers / work.chunks * self.layer + self.head
        )

    @cached_property
    def activations(self) -> Column:
        """Bytes of passes under way, of hidden states at the end, and of buffers for what neighbours send.

        Hidden states at the end are the last norm's and, whole, those before and after the head. A received
        activation is what its pass keeps, so that only the gradients that arrive have buffers beside: one a
        stage that has a next one.
        """
        work = self.work
        elements, parts = work.tokens * work.hidden, np.where(work.sequence_parallel > 0, work.tensor, 1)
        split = elements / parts * work.compute_bytes
        ends = split + self.has_head * (split + elements * (_FP32_BYTES / parts + 2 * work.compute_bytes))
        under_way = np.minimum(self.passes, work.micro_batches * work.chunks) * self.layers / work.chunks
        # Each pass of GPipe's last stage keeps the head's gradient of its tokens.
        waiting = np.where(np.isinf(self.passes) & (self.has_head > 0), work.micro_batches - 1, 0)
        buffers = (work.chunks - self.has_head) * self.is_pipeline
        kept = under_way * work.tokens * work.kept_bytes
        return kept + ends + waiting * (_FP32_BYTES * self.head + ends) + buffers * split

    @cached_property
    def losses(self) -> Column:
        """Bytes of a chunk's logits and of the head's gradient, which is summed in fp32 over the chunks."""
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
    """Return `one` where the condition holds, else `other`."""
    return MemoryBytes(
        *(np.where(condition, a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))
    )
