"""Seconds of tensor collectives in chunks: what is hidden, what never is, and when the planner offers it."""

from dataclasses import replace

import numpy as np
import pytest

from kielo.plan import layer_seconds as of_layers
from kielo.plan.choose_layout import named
from kielo.plan.collective_seconds import tensor_layer_seconds
from kielo.plan.compare import overlap_offer
from kielo.plan.efficiency import Efficiency
from kielo.plan.explain import explain
from kielo.plan.layer_seconds import exposed_tensor_seconds, layer_seconds
from kielo.plan.planned_layout import plan_layouts
from kielo.plan.run_to_plan import RunToPlan
from kielo.recipe.read import read_recipe
from tests.plan.workloads import workload

LARGE = {
    "hidden": 16384, "heads": 128, "kv_heads": 128, "ffn": 65536, "sequence": 8192, "tensor": 2,
    "sequence_parallel": 1, "memory_bandwidth": 1e30, "overlap_chunks": 2,
}  # fmt: skip


def ideal(monkeypatch) -> Efficiency:
    """Nothing but transfers and products: no latency, no waste of small products, no contention."""
    monkeypatch.setattr(of_layers, "BESIDE_COLLECTIVE", 1.0)
    tiny = np.array([1e-12])
    return Efficiency(
        Efficiency.start().values
        | {"latency_seconds": tiny, "wave_elements": tiny, "tile": tiny, "tensor_exposed": np.ones(4)}
    )


def test_behind_long_products_half_of_what_is_cut_is_hidden(monkeypatch):
    """Six of ten collectives a layer, four of fourteen where it is recomputed, run in two chunks, of which
    one has nothing beside it.
    """
    efficiency = ideal(monkeypatch)
    for again, left in ((0, 4 / 10 + 6 / 10 / 2), (1, 10 / 14 + 4 / 14 / 2)):
        work = workload(LARGE | {"layers_again": again})
        rates = efficiency.of(work)
        at_once = tensor_layer_seconds(work, rates)
        assert exposed_tensor_seconds(work, rates) == pytest.approx(left * at_once, rel=1e-6)
        whole = replace(work, overlap_chunks=np.ones(1))
        assert exposed_tensor_seconds(whole, rates) == at_once


def test_behind_short_products_no_more_than_they_take_is_hidden(monkeypatch):
    """Links so slow that a collective lasts longer than the product beside it, half of each product."""
    efficiency = ideal(monkeypatch)
    work = workload(LARGE | {"node_bandwidth": 1e9, "mlp_matrices": 2, "kv_heads": 64})
    rates = efficiency.of(work)
    # Times hidden × hidden: forward queries, keys and values 2, output 1, MLP 4 + 4; in the backward 1 + 4.
    covered = (2 + 1 + 4 + 4) + (1 + 4)
    products = layer_seconds(work, rates).matrix / (3 * (2 + 1 + 4 + 4))
    expected = tensor_layer_seconds(work, rates) - covered * products / 2
    assert exposed_tensor_seconds(work, rates) == pytest.approx(expected, rel=1e-6)


def test_smaller_products_and_copies_cost():
    """With fitted-like constants, chunks of a small model are slower than collectives at once."""
    work = workload(
        LARGE | {"hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 4096, "memory_bandwidth": 3e12}
    )
    rates = Efficiency.start().of(work)
    assert exposed_tensor_seconds(work, rates) > tensor_layer_seconds(work, rates)


def run_of(*sets: str) -> RunToPlan:
    return RunToPlan.of_recipe(read_recipe("estonian_llama31_70b", list(sets)).recipe)


def test_the_plan_offers_what_it_would_save_and_plans_it_alike():
    """The percentage is that of the layout with the key set; said once, never of one tensor rank."""
    planned = named(run_of(), 16, "tp8pp4zero1norecompute")
    offer = overlap_offer(planned)
    chunked = planned.layout.model_copy(update={"tensor_overlap": "chunked"})
    (other,) = plan_layouts(planned.run, [(chunked, 16, planned.micro_batch)])
    saved = 1 - other.step_seconds / planned.step_seconds
    assert (
        f'"chunked" would take {saved:.1%} off a step' in offer
        and "not measured on a GPU" in offer.replace("\n", " ")
    )
    (row,) = [row for row in explain(planned) if row.part == "chunked collectives"]
    assert row.seconds == other.step_seconds and "not measured on a GPU" in row.reason
    reasons = " ".join(row.reason for row in explain(other))
    assert overlap_offer(other) is None and "in 2 chunks beside products" in reasons
    alone = planned.layout.model_copy(update={"tensor": 1, "shard": 8 * planned.layout.shard})
    assert overlap_offer(replace(planned, layout=alone)) is None
