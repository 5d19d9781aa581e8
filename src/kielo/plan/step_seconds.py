"""Seconds of an optimiser step as a sum of parts, each with its formula; arithmetic, no torch."""

from dataclasses import dataclass, fields

import numpy as np

from kielo.plan.collective_seconds import (
    context_layer_seconds,
    data_seconds,
    expert_layer_seconds,
    ring_steps_seconds,
    stage_seconds,
)
from kielo.plan.efficiency import Efficiency
from kielo.plan.layer_seconds import exposed_tensor_seconds, head_seconds, layer_seconds
from kielo.plan.workload import Workload

Column = np.ndarray
_OVERLAP_SHARPNESS = 4


@dataclass(frozen=True)
class StepSeconds:
    """Columns [n] of seconds on the heaviest pipeline rank. `tensor_traffic` contains experts' traffic."""

    matrix: Column
    attention: Column
    elementwise: Column
    launch: Column
    head: Column
    bubble: Column
    tensor_traffic: Column
    context_traffic: Column
    pipeline_traffic: Column
    data_traffic: Column
    optimiser: Column
    fixed: Column
    slowest: Column

    @property
    def total(self) -> Column:
        return sum(getattr(self, field.name) for field in fields(self))


def step_seconds(work: Workload, efficiency: Efficiency) -> StepSeconds:
    """Compute seconds of an optimiser step by part, with pipelines by a closed form."""
    rates = efficiency.of(work)
    layer, head = layer_seconds(work, rates), head_seconds(work, rates)
    tensor, context = exposed_tensor_seconds(work, rates), context_layer_seconds(work, rates)
    expert = expert_layer_seconds(work, rates)
    layers, m = work.layers_of_heaviest_rank, work.micro_batches

    per_layer = layer.total(tensor + context + expert)
    # If layers make equal stages, the last stage also has the head. Else the head takes a layer's place.
    is_even = work.layers % (work.pipeline * work.chunks) == 0
    head_extra = np.where(is_even | (work.pipeline == 1), head, np.maximum(0, head - per_layer * work.chunks))
    heaviest = layers * per_layer + head_extra
    mean = (work.layers * per_layer + head) / work.pipeline
    # With a split backward pass, only the first micro-batch's forward pass leaves ranks idle.
    left = np.where(work.splits_backward > 0, 1 / 3, 1.0)
    bubble = np.maximum(0, work.pipeline * mean - heaviest) / work.chunks * left
    hop = stage_seconds(work, rates)
    hops = 2 * hop * (m * work.chunks * rates.pipeline_exposed + work.pipeline - 1)

    once, each = data_seconds(work, rates)
    backward = heaviest * 2 / 3
    each_hidden = np.where(work.zero == 3, rates.gather_hidden, rates.data_hidden)
    steps_once, steps_each = ring_steps_seconds(work, rates)
    data = _with_overlap(once, rates.data_hidden * backward, rates.overlap_cost)
    data = data + _with_overlap(each, each_hidden * heaviest, rates.overlap_cost) * m
    data = data + steps_once + steps_each * m
    routed = layers * work.routed_layer_parameters_of_rank
    frozen = layers * work.frozen * work.layer_parameters_of_rank
    dense = work.parameters_of_heaviest_rank - routed - frozen
    updated = np.where(work.zero > 0, dense / work.shard + routed / work.expert_shard, dense + routed)
    optimiser = updated * work.update_traffic_bytes / (work.memory_bandwidth * rates.memory)
    optimiser += updated * work.update_flops / (work.peak * rates.matrix)
    busy = m * heaviest + bubble
    device = layer.matrix + layer.attention + layer.elementwise + tensor + context + expert
    return StepSeconds(
        m * layers * layer.matrix,
        m * layers * layer.attention,
        m * layers * layer.elementwise,
        m * layers * (per_layer - device),
        m * head_extra,
        bubble,
        m * layers * (tensor + expert),
        m * layers * context,
        hops,
        data,
        optimiser,
        rates.step_seconds * np.ones(len(work)),
        busy * rates.jitter * np.sqrt(2 * np.log(np.maximum(work.devices, 1))),
    )


def hidden_data_seconds(work: Workload, efficiency: Efficiency, data_traffic: Column) -> Column:
    """Compute seconds of data-parallel traffic that work hides in a step. `data_traffic`: its part."""
    rates = efficiency.of(work)
    once, each = data_seconds(work, rates)
    steps_once, steps_each = ring_steps_seconds(work, rates)
    whole = once + steps_once + (each + steps_each) * work.micro_batches
    return np.maximum(0.0, whole - data_traffic) / (1 - rates.overlap_cost)


def _with_overlap(traffic: Column, hides: Column, overlap_cost: float) -> Column:
    """Compute seconds that `traffic` adds to work that can hide `hides`. Hidden traffic slows its kernels."""
    # All but the smaller of both, smoothly: traffic and work of similar length do not begin and end together.
    smaller, larger = np.minimum(traffic, hides), np.maximum(np.maximum(traffic, hides), 1e-12)
    hidden = smaller / (1 + (smaller / larger) ** _OVERLAP_SHARPNESS) ** (1 / _OVERLAP_SHARPNESS)
    exposed = traffic - hidden
    return exposed + overlap_cost * (traffic - exposed)
