"""Counts of a training that seconds follow from, by hand, and the columns of a machine."""

import pytest

from kielo.plan.workload import machine_columns
from kielo.recipe.cards import accelerator
from kielo.recipe.errors import KieloError
from tests.plan.workloads import workload

# Queries 8 wide, keys 4; an MLP of 16 in half of the layers, and in the others experts of 6 and a shared one
# of 4.
SMALL = {
    "hidden": 8, "heads": 4, "kv_heads": 2, "head_dim": 2, "ffn": 16, "mlp_matrices": 3, "vocabulary": 64,
    "layers": 7, "sequence": 16, "micro_batch": 2, "micro_batches": 3,
}  # fmt: skip
EXPERTS = {"experts": 4, "experts_each": 2, "expert_ffn": 6, "shared_ffn": 4, "expert_layers": 0.5}
PROJECTIONS, DENSE = 2 * 8 * (8 + 4), 3 * 8 * 16


def test_weights_of_a_layer_are_counted_by_hand():
    """Of a dense one, with low-rank projections, and with experts: all, and those that a token uses."""
    dense, low, routed = (
        workload(SMALL),
        workload(SMALL | {"projection_share": 0.5}),
        workload(SMALL | EXPERTS),
    )
    assert dense.layer_parameters == dense.active_layer_parameters == PROJECTIONS + DENSE
    assert low.layer_parameters == PROJECTIONS / 2 + DENSE
    shared = PROJECTIONS + DENSE / 2 + 3 * 8 * 4 / 2 + 8 * 4 / 2  # with the router
    assert routed.shared_layer_parameters == shared and routed.expert_parameters == 3 * 8 * 6 / 2
    assert routed.layer_parameters == shared + 4 * 72
    assert routed.active_layer_parameters == shared + 2 * 72
    assert routed.mlp_width_of_token == (16 + 4 + 2 * 6) / 2
    one = workload(SMALL | EXPERTS | {"experts": 1, "experts_each": 1})  # needs no router
    assert one.shared_layer_parameters == shared - 16


def test_ranks_share_what_there_is():
    """Devices, tokens and weights of a rank; experts are split over tensor ranks if replicas suffice."""
    layout = {"tensor": 2, "pipeline": 3, "context": 5, "data": 7, "shard": 7}
    work = workload(SMALL | layout)
    assert work.devices == 210 and work.tokens_per_step == 2 * 3 * 7 * 16 and work.tokens == 2 * 16 / 5
    assert work.layer_parameters_of_rank == (PROJECTIONS + DENSE) / 2
    rows = [
        {"tensor": 2, "data": 4, "expert_ranks": 4, "shard": 4},
        {"tensor": 2, "data": 2, "expert_ranks": 4, "shard": 2},
        {"tensor": 2, "data": 2, "context": 2, "expert_ranks": 4, "shard": 4},
        {"tensor": 2, "data": 16, "expert_ranks": 2, "shard": 8}, {"data": 1, "expert_ranks": 1},
    ]  # fmt: skip
    routed = workload(*(SMALL | EXPERTS | row for row in rows))
    assert list(routed.expert_tensor) == [2, 1, 2, 2, 1]
    assert list(routed.routed_layer_parameters_of_rank) == [36, 72, 36, 72, 288]
    assert list(routed.expert_shard) == [1, 1, 1, 4, 1]
    shared = routed.shared_layer_parameters / routed.tensor
    assert list(routed.layer_parameters_of_rank - shared) == pytest.approx([36, 72, 36, 72, 288])


def test_the_heaviest_rank_has_whole_layers_and_the_embedding():
    """Rounded up to whole stages, and never more than there are; a rank alone has the head too."""
    rows = [
        {}, {"pipeline": 2}, {"pipeline": 2, "chunks": 2}, {"pipeline": 7}, {"pipeline": 2, "chunks": 8},
        {"tied": 1}, {"tensor": 4},
    ]  # fmt: skip
    work = workload(*(SMALL | row for row in rows))
    layers = [7, 4, 4, 1, 7, 7, 7]
    assert list(work.layers_of_heaviest_rank) == layers
    each, table = PROJECTIONS + DENSE, 64 * 8
    ends = [2, 1, 1, 1, 1, 1, 2]
    expected = [many * each + number * table for many, number in zip(layers, ends)]
    expected[-1] /= 4
    assert list(work.parameters_of_heaviest_rank) == expected


def test_a_machines_columns_are_its_cards():
    """In units; the recipe's peak is that of its precision, or the next wider one; a node without a network
    talks over its links.
    """
    card = accelerator("h100_80").model_copy(
        update={"peak_tflops": {"bf16": 100.0, "fp8": 200.0, "fp4": 400.0}, "link_gb_per_second": 10.0,
                "memory_bandwidth_tb_per_second": 3.0, "power_share": 0.5}
    )  # fmt: skip
    assert machine_columns(card, 8e9, 4, "bf16") == {
        "architecture": 2, "peak": 100e12, "peak_recipe": 100e12, "power_share": 0.5,
        "memory_bandwidth": 3e12, "node_bandwidth": 10e9, "network_bandwidth": 2e9, "node_devices": 4,
    }  # fmt: skip
    assert machine_columns(card, 0.0, 4, "bf16")["network_bandwidth"] == 10e9

    def peak(recipe: str, **peaks: float) -> float:
        return machine_columns(card.model_copy(update={"peak_tflops": peaks}), 8e9, 4, recipe)["peak_recipe"]

    assert peak("nvfp4", bf16=1.0, fp8=2.0, fp4=4.0) == 4e12 and peak("nvfp4", bf16=1.0, fp8=2.0) == 2e12
    assert peak("fp8_rowwise", bf16=1.0, fp8=2.0, fp4=4.0) == 2e12 and peak("mxfp8", bf16=1.0) == 1e12
    for missing in ({"peak_tflops": {"fp8": 2.0}}, {"memory_bandwidth_tb_per_second": None}):
        with pytest.raises(KieloError, match="has no bf16 peak or no memory bandwidth, so nothing can be"):
            machine_columns(card.model_copy(update=missing), 8e9, 4, "bf16")
