"""Seconds of chunked collectives and of a pipeline's stages, added up by hand."""

import pytest
from pipeline_closed_forms import closed_form_seconds

from kielo.plan.layer_seconds import exposed_tensor_seconds
from kielo.plan.pipeline_simulation import StageSeconds
from kielo.plan.planned_layout import Passes, Pipeline, layout_pipeline, passes, with_simulation
from kielo.recipe.sections import Layout
from tests.plan.hand_made import model, run
from tests.plan.test_layer_seconds import SMALL, TOKENS, rates
from tests.plan.workloads import workload

# Four tensor ranks: a product [32, inner] × [inner, columns] of each, at 500 FLOP/s.
WHOLE = {"tensor": 4, "memory_bandwidth": 1e30, "heads": 8, "kv_heads": 4, "sequence_parallel": 1}
HALF = 3 / 4 * TOKENS * 8 * 2 / 5  # seconds of half an all-reduce


def waited(seconds: float, chunks: int, half: float = HALF) -> float:
    """Seconds that a collective of `half` adds to a product: a chunk, what the product is too short for, and
    a ninth of the time in which both run.
    """
    share = (chunks - 1) / chunks
    return half / chunks + share * max(0.0, half - seconds) + share * min(half, seconds) / 9


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("again", [0, 1])
def test_each_collective_waits_for_its_own_product(chunks, again):
    """Forward both gathers and both sums, backward the two gathers before turned products; where layers are
    made again only the forward gathers, twice. The others of 10 halves (14) are waited for.
    """
    work = workload(SMALL | WHOLE | {"head_dim": 1, "overlap_chunks": chunks, "layers_again": again})
    seconds = {
        "qkv": 2 * TOKENS * 4 * 8 / 500, "output": 2 * TOKENS * 8 * 2 / 500, "in": 2 * TOKENS * 8 * 8 / 500,
        "out": 2 * TOKENS * 8 * 4 / 500,
    }  # fmt: skip
    gathers = [waited(seconds[name], chunks) for name in ("qkv", "in")]
    sums = [2 * waited(seconds[name], chunks) for name in ("output", "out")]
    expected = 2 * sum(gathers) + 10 * HALF if again else sum(gathers) + sum(sums) + 4 * HALF
    assert exposed_tensor_seconds(work, rates()) == pytest.approx(expected)


def test_chunks_begin_copy_and_fill_less():
    """Of a gated MLP and attention: 2 s for each begin of 4 ranks, four chunks of 2; and elements copied."""
    base = SMALL | WHOLE | {"head_dim": 1, "overlap_chunks": 4, "layers_again": 1}
    late = exposed_tensor_seconds(workload(base), rates(latency_seconds=3.0))
    half = HALF + 4 * 3.0 * 2 / 2
    seconds = {"qkv": 2 * TOKENS * 4 * 8 / 500, "in": 2 * TOKENS * 8 * 8 / 500}
    at_once = 7 * (2 * HALF + 3.0 * 2)  # 14 halves of all-reduces, of which 4 are in chunks
    chunked = 2 * sum(waited(one, 4, half) for one in seconds.values())
    assert late == pytest.approx(at_once * 10 / 14 + chunked)
    # an exposed share of a half counts for all but what slows the product
    half_exposed = exposed_tensor_seconds(workload(base), rates(tensor_exposed=0.5))
    slows = 2 * sum(3 / 4 * min(HALF, one) / 9 for one in seconds.values())
    whole = exposed_tensor_seconds(workload(base), rates())
    assert half_exposed == pytest.approx((whole - slows) / 2 + slows)
    # each of four products of 8 tokens has 64 more elements of a wave
    waves = exposed_tensor_seconds(workload(base), rates(wave_elements=64.0))
    extra, added = 0.0, 0.0
    for columns, one in ((4, seconds["qkv"]), (8, seconds["in"])):
        pieces = one * (1 + 64 / (TOKENS / 4 * columns))
        extra += 2 * (pieces - one * (1 + 64 / (TOKENS * columns)))
        added += 2 * waited(pieces, 4)
    assert waves == pytest.approx(10 * HALF + added + extra)
    # memory of 100 bytes a second and products of no time: copies of results are read and written in 2 bytes
    slow = SMALL | WHOLE | {"head_dim": 1, "layers_again": 1, "peak": 1e30, "memory_bandwidth": 100.0}
    more = exposed_tensor_seconds(workload(slow | {"overlap_chunks": 2}), rates(memory=0.5))
    pieces = copies = added = 0.0
    for columns in (4, 8):
        alone = 2 * (TOKENS * 8 + 8 * columns + TOKENS * columns) / 50
        both = alone + 2 * 8 * columns / 50  # weights are read for each of two chunks
        copies += 2 * (2 * 2 * TOKENS * columns / 50)
        pieces += 2 * (both - alone)
        added += 2 * waited(both, 2)
    assert more == pytest.approx(10 * HALF + added + pieces + copies)
    joined = exposed_tensor_seconds(
        workload(slow | {"overlap_chunks": 2, "layers_again": 0}), rates(memory=0.5)
    )
    added = 0.0
    for columns, inner, copied, times in (
        (4, 8, 4, 1), (8, 8, 8, 1),  # results of gathers' products
        (8, 2, 2, 1), (2, 8, 10, 1), (8, 4, 4, 1), (4, 8, 12, 1),  # inputs of sums', and both of the turned
    ):  # fmt: skip
        alone = 2 * (TOKENS * inner + inner * columns + TOKENS * columns) / 50
        both = alone + 2 * inner * columns / 50
        added += times * (waited(both, 2) + both - alone + 2 * 2 * TOKENS * copied / 50)
    assert joined == pytest.approx(4 * HALF + added)


def test_one_of_many_is_not_chunked():
    """Rows with and without chunks in one workload have the seconds that each has alone."""
    rows = [SMALL | WHOLE, SMALL | WHOLE | {"overlap_chunks": 2}]
    together = exposed_tensor_seconds(workload(*rows), rates())
    assert together == pytest.approx([exposed_tensor_seconds(workload(row), rates())[0] for row in rows])


def test_stages_have_thirds_of_their_layers():
    """Five layers of 7 s on a rank, of 3.5 parts, as half is made again; three, and a head of 3 s."""
    one = Passes(layer=7.0, head=3.0, hop=0.25, again=0.5, exposed=0.1)
    layout = Layout(pipeline=2, shard=1)
    found = layout_pipeline(model(), layout, one, 5, 2048)
    assert (found.schedule, found.ranks, found.micro_batches, found.layers) == ("1f1b", 2, 5, (5, 3))
    assert (found.head, found.exposed, found.stages.hop) == (3.0, 0.2, 0.25)
    assert found.stages.forward == pytest.approx((10 + 0.1, 6 + 0.1 + 1))
    assert found.stages.backward_inputs == pytest.approx((15 + 0.1, 9 + 0.1 + 1))
    assert found.stages.backward_weights == pytest.approx((10, 7))
    assert found.stages.whole() == pytest.approx([35.2, 24.2])
    assert found.busiest_rank() == (0,)
    # one after another: 5 × 35.2 of the first rank, 24.2 of the last once, and hops
    clock = (found.schedule, found.stages, found.ranks, found.micro_batches)
    assert closed_form_seconds(*clock) == pytest.approx(5 * 35.2 + 24.2 + 2 * 0.25 * (1 + 4 / 2))


def test_the_bubble_is_what_a_simulated_step_takes_beyond_the_busiest_ranks_work():
    """Of 3 and 5 layers the last rank has 5, where 4 were assumed; what grows with layers is 5/4."""
    stages = StageSeconds((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))
    names = ("matrix", "attention", "elementwise", "launch", "tensor_traffic", "context_traffic")
    parts = {name: 0.4 * number for number, name in enumerate(names, start=1)}
    parts |= {"head": 1.0, "bubble": 2.0, "pipeline_traffic": 9.0, "slowest": 0.57, "fixed": 0.3}
    pipeline = Pipeline("1f1b", 2, 4, stages, (3, 5), head=0.25, exposed=0.125)
    found = with_simulation(parts, pipeline, 4.0)
    simulated = 4 * 6 + 3  # the last rank's work, and the way to it and back
    work = 0.4 * 21 * 5 / 4 + 4 * 0.25 + 4 * 0.125
    expected = {name: 0.4 * number * 5 / 4 for number, name in enumerate(names, start=1)}
    expected |= {"head": 1.0, "pipeline_traffic": 0.5, "bubble": simulated - work, "fixed": 0.3}
    assert found == pytest.approx(expected | {"slowest": 0.57 * simulated / (0.4 * 21 + 3)})
    # the first rank is busier: the head is not there; and a rank that works longer has no bubble
    turned = Pipeline("1f1b", 2, 4, StageSeconds((2.0, 1.0), (2.0, 1.0), (2.0, 1.0)), (5, 3), 0.25, 0.125)
    assert with_simulation(parts, turned, 4.0)["head"] == 0.0
    assert with_simulation(parts | {"matrix": 1000.0}, pipeline, 4.0)["bubble"] == 0.0
    four = StageSeconds.equal(4, 1.0)
    chunks = Pipeline("interleaved_1f1b", 2, 4, four, (2, 2, 2, 2), 0.25, 0.125)
    assert chunks.busiest_rank() == (0, 2)
    assert with_simulation(parts, chunks, 4.0)["pipeline_traffic"] == 4 * 2 * 0.125


def test_passes_are_those_of_a_workload():
    """A hop keeps its rank busy for the exposed share; operators are made again by a half of the forward."""
    of = run()
    rows = [SMALL | {"pipeline": 2} | more for more in ({}, {"operators_again": 1}, {"layers_again": 0.75})]
    work = workload(*rows)
    found = passes(work, of.efficiency)
    assert [one.again for one in found] == [0, 0.5, 0.75]
    assert [one.exposed for one in found] == pytest.approx([0.4 * one.hop for one in found])
    assert min(one.hop for one in found) > 0 and isinstance(found[0].layer, float)
