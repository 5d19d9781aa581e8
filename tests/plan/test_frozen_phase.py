"""A phase with a frozen body is cheaper in plans and on the ranks of a rehearsal."""

from math import prod

import pytest

from kielo.models.parameter_shapes import parameter_shapes
from kielo.plan.planned_layout import plan_layouts
from kielo.recipe.phases import full_phases
from kielo.verify.rehearse import rehearse
from tests.plan.test_search import run_of
from tests.verify.test_rehearse import planned


def test_a_plan_counts_the_cheaper_phase():
    """Norwegian 7B: two thirds of the layers' FLOPs, and moments of the embedding and the head alone."""
    run = run_of("norwegian_7b_warm")
    layout = run.recipe.layout.model_copy(update={"shard": 128, "replicate": 1})
    frozen, whole = (plan_layouts(run, [(layout, 16, 2)], phase)[0] for phase in full_phases(run.recipe))
    assert 0.62 < frozen.step_seconds / whole.step_seconds < 0.8
    sizes = {name: prod(shape) for name, shape in parameter_shapes(run.model).items()}
    trained = (sizes["embed.weight"] + sizes["head.weight"]) / sum(sizes.values())
    assert frozen.bytes["optimiser"] == pytest.approx(trained * whole.bytes["optimiser"], rel=0.02)


@pytest.mark.full
def test_frozen_modules_send_no_gradients():
    """On two shards only gradients of the embedding and the head are reduced."""
    sets = ("layout.shard=2", "layout.zero=3")
    whole = rehearse(planned(2, *sets), 0)
    resolved = planned(2, *sets, 'train.trainable=["embed", "head"]')
    frozen = rehearse(resolved, 0)
    sent = [
        {row["operation"]: row["bytes"] for row in one["collectives"] if row["axis"] == "shard"}
        for one in (whole, frozen)
    ]
    shapes = parameter_shapes(resolved.identity.model)
    total = sum(map(prod, shapes.values()))
    trained = 2 * 4098 * 64
    assert sent[1]["reduce-scatter"] == pytest.approx(sent[0]["reduce-scatter"] * trained / total)
    matrices = sum(
        prod(shape) for name, shape in shapes.items() if name.startswith("layers.") and len(shape) == 2
    )
    flops = [sum(one["flops"].values()) for one in (whole, frozen)]
    assert flops[0] - flops[1] == 2 * matrices * 256  # tokens of a rank
    assert frozen["state_bytes"] == frozen["computed_state_bytes"]
