"""The pipeline's clock: closed forms against simulation and against the fractions that papers state."""

from collections import defaultdict

import pytest

from kielo.plan.pipeline_simulation import StageSeconds, closed_form_seconds, simulated_seconds, timeline

SCHEDULES = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4),
    ("interleaved_zero_bubble", 2), ("zbv", 2),
    ("dualpipev", 2),
]  # fmt: skip
SIZES = [(2, 8), (4, 8), (4, 32), (8, 16), (8, 64)]


def stages(ranks: int, chunks: int, hop: float = 0.0, heavy_last: float = 1.0) -> StageSeconds:
    forward = (1.0 / chunks,) * (ranks * chunks - 1) + (heavy_last / chunks,)
    return StageSeconds(forward, forward, forward, hop)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_closed_form_and_simulation_agree(schedule, chunks, ranks, micro_batches):
    """Within 2 %: for equal stages, for hops of 2 % of a forward pass,
    and for a last stage that has the head.
    """
    for given in (
        stages(ranks, chunks),
        stages(ranks, chunks, hop=0.02),
        stages(ranks, chunks, heavy_last=1.3),
    ):
        simulated = simulated_seconds(schedule, given, ranks, micro_batches)
        assert closed_form_seconds(schedule, given, ranks, micro_batches) == pytest.approx(
            simulated, rel=0.02
        )


@pytest.mark.parametrize(
    ("schedule", "chunks", "bubble"),
    [
        ("gpipe", 1, 3 / 8),
        ("1f1b", 1, 3 / 8),
        ("interleaved_1f1b", 2, 3 / 16),
        ("interleaved_1f1b", 4, 3 / 32),
        ("zbv", 2, 1 / 16),
    ],
)
def test_bubbles_are_those_of_the_papers(schedule, chunks, bubble):
    """(p - 1)/m for GPipe and 1F1B, (p - 1)/(v m) interleaved;
    for ZB-V only the first forward's way, (p - 1)/(6 m).
    """
    seconds = simulated_seconds(schedule, StageSeconds.equal(4 * chunks, 1.0 / chunks), 4, 8)
    assert seconds / (8 * 3) - 1 == pytest.approx(bubble)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_a_timeline_can_happen(schedule, chunks):
    """A rank does one thing at a time, everything once, and nothing before what it needs has arrived."""
    ranks, micro_batches, hop = 4, 8, 0.1
    spans = timeline(schedule, stages(ranks, chunks, hop), ranks, micro_batches)
    of_rank, done = defaultdict(list), {}
    for span in spans:
        of_rank[span.rank].append(span)
        assert (span.kind, span.stage, span.micro_batch) not in done
        done[span.kind, span.stage, span.micro_batch] = span
    kinds = 3 if any(span.kind == "weights" for span in spans) else 2
    assert len(spans) == kinds * ranks * chunks * micro_batches
    for some in of_rank.values():
        assert all(before.end <= after.start + 1e-9 for before, after in zip(some, some[1:]))
    last = ranks * chunks - 1
    for span in spans:
        needs = {
            "forward": ("forward", span.stage - 1),
            "backward": ("backward", span.stage + 1),
            "weights": ("backward", span.stage),
        }
        kind, stage = needs[span.kind]
        if span.kind == "backward" and span.stage == last:
            kind, stage = "forward", last
        if stage >= 0:
            need = done[kind, stage, span.micro_batch]
            assert span.start >= need.end + hop * (need.rank != span.rank) - 1e-9


@pytest.mark.parametrize(
    ("schedule", "chunks", "ranks", "micro_batches"),
    [
        *(
            ("interleaved_1f1b", chunks, *size)
            for chunks in (2, 3)
            for size in ((8, 6), (8, 3), (16, 27), (8, 30), (5, 12))
        ),
        *(("interleaved_zero_bubble", 2, *size) for size in ((16, 27), (8, 30), (5, 12))),
    ],
)
def test_rounds_of_any_size_agree(schedule, chunks, ranks, micro_batches):
    """Micro-batches that are fewer than the ranks, or no multiple of them, in rounds as torch makes them."""
    given = stages(ranks, chunks, hop=0.02)
    simulated = simulated_seconds(schedule, given, ranks, micro_batches)
    assert simulated == pytest.approx(
        max(span.end for span in timeline(schedule, given, ranks, micro_batches))
    )
    assert closed_form_seconds(schedule, given, ranks, micro_batches) == pytest.approx(simulated, rel=0.02)


def test_long_steps_repeat_themselves():
    """A thousand micro-batches cost what their repeating part says."""
    given = StageSeconds.equal(4, 1.0)
    assert simulated_seconds("1f1b", given, 4, 1000) == pytest.approx((1000 + 3) * 3)
