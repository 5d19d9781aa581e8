"""The pipeline's clock: closed forms against simulation and against the fractions that papers state."""

from collections import defaultdict
from dataclasses import replace

import pytest
from pipeline_closed_forms import closed_form_seconds

from kielo.plan.pipeline_simulation import StageSeconds, simulated_seconds, timeline

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


GROWING = StageSeconds((1.0, 2.0, 3.0, 4.0), (2.0, 4.0, 6.0, 8.0), (1.0, 2.0, 3.0, 4.0), 0.5)  # 4 n in all
NO_HOPS = replace(GROWING, hop=0.0)


@pytest.mark.parametrize(
    ("schedule", "given", "ranks", "micro_batches", "seconds"),
    [
        # forward 3, backward 9; three more of the slowest, 2 + 6; a hop each way
        ("gpipe", StageSeconds((1.0, 2.0), (2.0, 4.0), (1.0, 2.0), 0.5), 2, 4, 3 + 9 + 3 * (2 + 6) + 1),
        # 4 of the last rank's 8, and the first's 4 once; hops of every second micro-batch are waited for
        ("1f1b", StageSeconds((1.0, 2.0), (2.0, 4.0), (1.0, 2.0), 0.5), 2, 4, 4 * 8 + 4 + 1 * (1 + 3 / 2)),
        ("1f1b", StageSeconds((2.0, 1.0), (4.0, 2.0), (2.0, 1.0), 0.5), 2, 4, 4 * 8 + 4 + 1 * (1 + 3 / 2)),
        # the first rank has 4 + 12 and waits for stage 3, the last has 8 + 16 and waits for stage 0
        ("interleaved_1f1b", GROWING, 2, 4, 4 * 24 + 4 + 2),
        ("interleaved_1f1b", StageSeconds.equal(4, 1.0), 2, 4, 4 * 6 + 3),
        # fewer micro-batches than ranks: one after another
        ("interleaved_1f1b", GROWING, 2, 1, 40 + 3),
        ("interleaved_1f1b", StageSeconds((1.0,) * 6, (1.0,) * 6, (2.0,) * 6, 0.5), 3, 2, 24 + 4 + 5),
        # the way forward, and the way back less the work on weights that waits
        ("interleaved_zero_bubble", NO_HOPS, 2, 4, 4 * 24 + 1 + (2 - 1)),
        ("interleaved_zero_bubble", StageSeconds((1.0,) * 4, (1.0,) * 4, (3.0,) * 4, 0.0), 2, 4, 4 * 10 + 1),
        ("interleaved_zero_bubble", GROWING, 2, 4, 4 * 24 + 1 + (2 - 1) + 2 * 0.5),
        ("zbv", NO_HOPS, 2, 4, 4 * 20 + 1),
        # 1.4 hops more for each micro-batch and doubling of the ranks
        ("zbv", GROWING, 2, 4, 4 * 20 + 1 + (2 + 1.4 * 4) * 0.5),
    ],
)
def test_closed_forms_of_unequal_stages_are_added_up_by_hand(schedule, given, ranks, micro_batches, seconds):
    assert closed_form_seconds(schedule, given, ranks, micro_batches) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("schedule", "chunks", "micro_batches", "rank", "order"),
    [
        ("gpipe", 1, 2, 0, "F00 F01 B00 B01"),
        ("1f1b", 1, 3, 0, "F00 F01 B00 F02 B01 B02"), ("1f1b", 1, 3, 1, "F10 B10 F11 B11 F12 B12"),
        ("interleaved_1f1b", 2, 4, 0,
         "F00 F01 F20 F21 F02 B20 F03 B21 F22 B00 F23 B01 B22 B23 B02 B03"),
        ("interleaved_1f1b", 2, 4, 1,
         "F10 F11 F30 B30 F31 B31 F12 B10 F13 B11 F32 B32 F33 B33 B12 B13"),
        ("interleaved_zero_bubble", 2, 2, 0, "F00 F01 F20 F21 B20 W20 B21 W21 B00 W00 B01 W01"),
        ("interleaved_zero_bubble", 2, 2, 1, "F10 F11 F30 B30 F31 B31 W30 B10 W31 B11 W10 W11"),
        ("zbv", 2, 1, 0, "F00 F30 B30 W30 B00 W00"), ("zbv", 2, 1, 1, "F10 F20 B20 B10 W20 W10"),
    ],
)  # fmt: skip
def test_two_ranks_work_in_the_orders_of_the_papers(schedule, chunks, micro_batches, rank, order):
    """Each task as kind, stage and micro-batch: forward, backward (of inputs), weights."""
    spans = timeline(schedule, stages(2, chunks), 2, micro_batches)
    letter = {"forward": "F", "backward": "B", "weights": "W"}
    found = [f"{letter[s.kind]}{s.stage}{s.micro_batch}" for s in spans if s.rank == rank]
    assert " ".join(found) == order


def test_a_timeline_has_the_seconds_of_its_tasks():
    """1F1B on two ranks by hand: a hop between ranks, and a backward pass with its weights."""
    given = StageSeconds((1.0, 2.0), (2.0, 4.0), (1.0, 2.0), 0.5)
    spans = {(s.kind, s.stage, s.micro_batch): (s.start, s.end) for s in timeline("1f1b", given, 2, 2)}
    assert spans == {
        ("forward", 0, 0): (0, 1), ("forward", 0, 1): (1, 2), ("forward", 1, 0): (1.5, 3.5),
        ("backward", 1, 0): (3.5, 9.5), ("forward", 1, 1): (9.5, 11.5), ("backward", 0, 0): (10, 13),
        ("backward", 1, 1): (11.5, 17.5), ("backward", 0, 1): (18, 21),
    }  # fmt: skip
    assert simulated_seconds("1f1b", given, 2, 2) == 21


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("micro_batches", [97, 130])
def test_a_long_step_takes_what_its_whole_timeline_takes(schedule, chunks, micro_batches):
    """Its repeating part is simulated once, of unequal stages, with a rest of a round; of a V within 1 %."""
    given = stages(3, chunks, hop=0.02, heavy_last=1.2)
    whole = max(span.end for span in timeline(schedule, given, 3, micro_batches))
    assert simulated_seconds(schedule, given, 3, micro_batches) == pytest.approx(
        whole, rel=0.01 if schedule in ("zbv", "dualpipev") else 1e-9
    )
