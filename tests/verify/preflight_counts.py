"""Counts what a preflight computes, sends and writes, by layout, and the seconds of that at slow rates.

The rates are those below which the checks refuse a node, so the seconds are those of the slowest job that
passes. The start of Python, of the ranks and of their communicators is that of training and not in them.
"""

from dataclasses import dataclass
from math import prod

from kielo.recipe.cards import Accelerator, Cluster
from kielo.recipe.sections import Layout
from kielo.resolve.shares import AXES
from kielo.verify.layouts_subject import HEAD_DIM, VOCABULARY
from kielo.verify.preflight import training
from kielo.verify.preflight.check_nodes import CHECKS
from kielo.verify.preflight.collectives import (
    COLLECTIVES,
    DTYPES,
    LEAST_OF_NETWORK,
    collectives_of,
    network_share,
    num_elements,
)
from kielo.verify.preflight.device import LEAST_OF_PEAK
from kielo.verify.preflight.job import CLOCK_ROUNDS, STEPS, Sizes

_GIGA = 1e9
# Of a small collective between nodes; 20 to 100 µs are usual.
_SECONDS_PER_COLLECTIVE = 2e-3
# On rank 0, of one message of a gathered or scattered object.
_SECONDS_PER_HOST_MESSAGE = 0.3e-3
# Objects of each check: sizes and contents are gathered and scattered, and an error's text is sent to all.
_HOST_ROUNDS_OF_CHECK = 6
# One core of this tiny model's training on one process (measured, 2026-11-23, benchmarks/log/2026-11.md).
_CPU_FLOPS_PER_SECOND = 5e9
_NODE_FILE_BYTES_PER_SECOND = 0.5e9
# At most: a layer's collectives in a micro-batch on tensor (with recomputation), context and FSDP's axes and
# its messages, and those of a step; parameters of a layer, of which gradient and weight are gathered twice.
_COLLECTIVES_OF_LAYER, _COLLECTIVES_OF_STEP, _PARAMETERS_OF_LAYER = 30, 40, 16


@dataclass(frozen=True)
class Counts:
    """Counts of one rank, but for the host's messages, which are rank 0's.

    collectives: calls of the collectives' check. sent_bytes: group's ranks → bytes that they send.
    training_collectives: at most. training_flops: of one process alone. file_bytes: written, and as many
    read, by a node.
    """

    flops: float
    copied_bytes: float
    collectives: int
    sent_bytes: dict[int, float]
    training_collectives: int
    training_flops: float
    host_messages: int
    file_bytes: int


def count(layout: Layout, sizes: Sizes) -> Counts:
    """Counts the checks of a job with this (resolved) layout."""
    ranks = prod(getattr(layout, axis) for axis in AXES)
    calls, sent = 0, {}
    for group in group_sizes(layout):
        of_group = _calls_of_group(group, sizes)
        calls += len(of_group)
        sent[group] = sent.get(group, 0.0) + sum(of_group)
    rounds = sizes.rounds
    barriers = CLOCK_ROUNDS + 3
    return Counts(
        flops=2 * sizes.matrix**3 * (rounds * sizes.products + 3),
        copied_bytes=2 * sizes.copy_bytes * rounds * sizes.copies,
        collectives=calls,
        sent_bytes=sent,
        training_collectives=_training_collectives(layout),
        training_flops=_training_flops(layout),
        host_messages=ranks * (_HOST_ROUNDS_OF_CHECK * len(CHECKS) + barriers),
        file_bytes=sizes.file_bytes,
    )


def group_sizes(layout: Layout) -> list[int]:
    """Returns the ranks of each group that the collectives' check uses, as `collectives.groups_of` finds."""
    found = [getattr(layout, axis) for axis in AXES if getattr(layout, axis) > 1]
    if layout.context > 1 and layout.shard > 1:
        found.append(layout.shard * layout.context)
    world = prod(getattr(layout, axis) for axis in AXES)
    return found if world in found or world == 1 else [*found, world]


def _calls_of_group(group: int, sizes: Sizes) -> list[float]:
    """Returns the bytes that a rank sends in each call on a group of so many ranks."""
    calls = []
    for name in collectives_of(group):
        share = COLLECTIVES[name].sent_share(group)
        each = [
            share * num_elements(size, dtype, group) * dtype.itemsize
            for dtype in DTYPES
            for size in sizes.message_bytes
        ]
        calls += each + [each[-1]] * sizes.timed_collectives
    return calls


def _training_collectives(layout: Layout) -> int:
    layers = -(-training.sizes_of(layout).layers // layout.pipeline) + 1  # and the embedding or the head
    steps = STEPS * (
        training.micro_batches_of(layout) * layers * _COLLECTIVES_OF_LAYER + _COLLECTIVES_OF_STEP
    )
    return steps + 2 * 2 * layers * _PARAMETERS_OF_LAYER


def _training_flops(layout: Layout) -> float:
    """Returns 6 FLOPs for each parameter and token, with a gated MLP and all heads whole."""
    of = training.sizes_of(layout)
    hidden = 2 * of.key_value_heads * HEAD_DIM
    weights = of.layers * (4 * hidden**2 + 3 * hidden * of.intermediate_size) + VOCABULARY * hidden
    return 6.0 * weights * of.sequences * of.length * STEPS


def seconds(counts: Counts, ranks: int, cluster: Cluster, device: Accelerator) -> dict[str, float]:
    """Returns the seconds of each check that takes any, at the slowest rates that pass."""
    nodes = -(-ranks // cluster.devices_per_node)
    device_seconds = counts.flops / (LEAST_OF_PEAK * device.peak_tflops["bf16"] * 1e12)
    if device.memory_bandwidth_tb_per_second:
        device_seconds += counts.copied_bytes / (LEAST_OF_PEAK * device.memory_bandwidth_tb_per_second * 1e12)
    sending = 0.0
    for group, sent in counts.sent_bytes.items():
        # A group whose ranks are far apart in the mesh is on as many nodes as it has ranks, at most.
        share = network_share(cluster, group, min(nodes, group)) or device.link_gb_per_second
        sending += sent / (LEAST_OF_NETWORK * share * _GIGA)
    file_rate = min(
        nodes * _NODE_FILE_BYTES_PER_SECOND, (cluster.file_system_gb_per_second or float("inf")) * _GIGA
    )
    return {
        "device": device_seconds,
        "collectives": sending + counts.collectives * _SECONDS_PER_COLLECTIVE,
        "files": 2 * nodes * counts.file_bytes / file_rate,
        "training": counts.training_flops / _CPU_FLOPS_PER_SECOND
        + counts.training_collectives * _SECONDS_PER_COLLECTIVE,
        "gathering": counts.host_messages * _SECONDS_PER_HOST_MESSAGE,
    }
