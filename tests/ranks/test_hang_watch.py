"""Heartbeats of many ranks are judged alike whatever the clocks do, and the cause of a hang is the rank that
the others wait for.
"""

import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from kielo.ranks.hang_watch import (
    STEPS,
    Beat,
    Hang,
    HangWatch,
    Progress,
    beat_seconds,
    describe,
    describe_stall,
    group_key,
    silent_seconds,
    stall_limit,
    stuck_seconds,
)
from kielo.train.watch.slow_ranks import marked_layers

USUAL = Beat(
    number=1, step=7, doing=STEPS, moves=10, entered={"0,1,2,3": 5}, at="kielo/train/loop.py:20 in fit",
    is_inside=True, still_seconds=30.0, silent_seconds=30.0, stall_seconds=6.0, p99_seconds=2.0,
)  # fmt: skip


def watched(rounds: list[list[Beat]], seconds: float = 0.5):
    """Returns what the last of these looks finds; the looks before it must find nothing."""
    watch = HangWatch(len(rounds[0]), 0.5)
    *before, last = [watch.look(beats, seconds) for beats in rounds]
    assert before == [None] * len(before)
    return last


def beating(beats: list[Beat], looks: int, silent: tuple[int, ...] = ()) -> list[list[Beat]]:
    """The ranks beat and do not get on; those of `silent` do not even beat."""
    return [
        [beat if rank in silent else replace(beat, number=look) for rank, beat in enumerate(beats)]
        for look in range(looks)
    ]


def test_a_frozen_rank_is_named_after_the_limit():
    """30 s at a look each half second: the first look shows nothing yet, the 62nd is beyond."""
    four = [USUAL] * 4
    assert watched(beating(four, 61, silent=(2,))) is None
    hang = watched(beating(four, 62, silent=(2,)))
    assert hang.ranks == (2,) and hang.is_silent and hang.seconds == 30.5


def test_silence_has_a_limit_of_its_own():
    """While others wait for long work: the silent rank is the cause, and not the wait. The limit is never
    below the floor, whatever the time limit of collectives.
    """
    four = [replace(USUAL, still_seconds=1800.0, silent_seconds=1.0)] * 4
    hang = watched(beating(four, 4, silent=(2,)))
    assert hang.ranks == (2,) and hang.is_silent and "the limit is 1 s" in hang.reason
    assert Progress(30.0, 15.0, 120.0, 1.0).limits() == (120.0, 30.0)


@pytest.mark.parametrize("change", [{"step": 8}, {"moves": 11}, {"doing": "a save"}])
def test_a_slow_job_is_none(change):
    """One rank gets on, by a step, a collective or its next work, and all are given time again."""
    waiting = beating([USUAL] * 4, 60)
    moved = [[*beats[:3], replace(beats[3], **change)] for beats in beating([USUAL] * 4, 61)]
    assert watched(waiting + moved) is None


def test_a_job_that_was_stopped_as_a_whole_is_none():
    """The watcher was stopped too: an hour between two of its looks counts as a second."""
    watch = HangWatch(2, 0.5)
    assert watch.look([USUAL] * 2, 0.5) is None
    assert watch.look([USUAL] * 2, 3600.0) is None


def test_the_longest_limit_of_all_ranks_holds():
    """One rank compiles or saves, and the others wait for it."""
    assert watched(beating([USUAL, replace(USUAL, still_seconds=1800.0)], 200)) is None


# Groups → how many collectives each rank has begun: which rank do the others wait for?
ENTERED = {
    "one group": ([{"0,1,2,3": 5}, {"0,1,2,3": 5}, {"0,1,2,3": 4}, {"0,1,2,3": 5}], (2,)),
    # 3 waits in its tensor group for 2, and so has not come to its data group, where 1 waits for it.
    "tensor × data": ([{"0,1": 9, "0,2": 3}, {"0,1": 9, "1,3": 4}, {"2,3": 8, "0,2": 3},
                       {"2,3": 9, "1,3": 3}], (2,)),
    "alike": ([{"0,1": 5}, {"0,1": 5}], ()),
}  # fmt: skip


@pytest.mark.parametrize("case", ENTERED)
def test_the_cause_is_the_rank_that_others_wait_for(case):
    entered, cause = ENTERED[case]
    assert watched(beating([replace(USUAL, entered=one) for one in entered], 62)).ranks == cause


def test_where_counts_are_alike_the_cause_is_the_rank_outside_of_torch():
    """Messages of pipelines are not counted alike on all ranks."""
    beats = [USUAL, replace(USUAL, is_inside=False, at="kielo/train/feed.py:86 in take"), USUAL]
    hang = watched(beating(beats, 62))
    message = describe(hang, beats, {1: "nid7 (process 12)"}, {})
    assert hang.ranks == (1,) and not hang.is_silent
    assert "rank 1 on nid7 (process 12) at kielo/train/feed.py:86 in take, while ranks 0, 2 wait" in message
    assert "30 s without progress (the limit is 30 s, and steps usually pause for at most 2 s)" in message


def test_collectives_that_do_not_match_are_named_with_both_lines():
    beats = [USUAL, replace(USUAL, at="my_loss.py:3 in loss"), USUAL]
    message = describe(watched(beating(beats, 62)), beats, {}, {})
    assert "ranks 0, 2 at kielo/train/loop.py:20 in fit; rank 1 at my_loss.py:3 in loss" in message


def test_what_is_not_known_is_not_in_the_message():
    """Places, states, and even the beats; of more than eight ranks their number is told."""
    beats = [replace(USUAL, at=f"line {rank}") for rank in range(10)]
    hang = Hang((1,), True, 3.4, "without a heartbeat")
    ending = (
        ". Fix: start again from the newest checkpoint. If it recurs on the same node, leave that node out"
    )
    stands = "the job hangs, 3 s without a heartbeat"
    assert describe(hang, [], {}, {}) == f"{stands}. The cause: rank 1{ending}"
    assert describe(hang, [], {1: "nid7"}, {1: "it has ended"}) == (
        f"{stands}. The cause: rank 1 on nid7 (it has ended){ending}"
    )
    assert describe(hang, beats[:2], {}, {1: "it has ended"}) == (
        f"{stands} after step 7, during steps. The cause: rank 1 (it has ended) at line 1, "
        f"while rank 0 waits at line 0{ending}"
    )
    nine = replace(hang, ranks=tuple(range(1, 10)))
    told = describe(nine, beats, {}, {})
    assert (
        "rank 7 at line 7, rank 8 at line 8 and 1 more, while rank 0 waits at line 0" in told
        and "rank 9" not in told
    )
    assert "rank 8 at line 8, while ranks 0, 9 wait, the first at line 0" in describe(
        replace(hang, ranks=tuple(range(1, 9))), beats, {}, {}
    )
    told = describe(hang, beats, {}, {})
    assert ", while ranks 0, 2, 3, 4, 5, 6, 7, 8 and 1 more wait, the first at line 0" in told
    assert "and" not in describe(hang, beats[:9], {}, {}).partition("while ")[2].partition(" wait")[0]


def test_a_network_that_lost_a_message_is_likely_where_all_ranks_wait_at_one_line():
    told = describe(Hang((), False, 3.0, "without progress"), [USUAL] * 2, {}, {})
    assert told == (
        "the job hangs, 3 s without progress: all ranks wait for each other: ranks 0, 1 at "
        "kielo/train/loop.py:20 in fit. The network probably lost a message. Fix: start again"
    )


def test_beats_come_more_seldom_from_more_ranks():
    """A thousand of all ranks in a second; a pause is worth a line after five beats at the least."""
    assert [beat_seconds(ranks) for ranks in (1, 500, 501, 6000)] == [0.5, 0.5, 0.501, 6.0]
    assert [stall_limit(0.5, seconds) for seconds in (1.0, 2.5, 3.0)] == [2.5, 2.5, 3.0]
    assert Beat.read(USUAL.text()) == USUAL
    last = Beat.last(4)
    assert (last.number, last.still_seconds, last.silent_seconds, last.stall_seconds) == (4, *[math.inf] * 3)


@pytest.mark.parametrize(("still", "told_after"), [(6.0, None), (6.01, 6.001)])
def test_a_pause_is_told_where_its_limit_is_below_that_of_a_hang(still, told_after):
    """And once it is passed, not only reached: 6 s here."""
    watch, beats = HangWatch(1, 0.5), [replace(USUAL, still_seconds=still, silent_seconds=100.0)]
    watch.look(beats, 0.5)
    for _ in range(6):
        watch.look(beats, 1.0)
        assert watch.stall(beats) is None
    watch.look(beats, 0.001)
    stall = watch.stall(beats)
    assert (None if stall is None else stall.seconds) == (told_after and pytest.approx(told_after))


def test_the_longest_limits_and_pauses_of_all_ranks_count() -> None:
    """Each of another rank: silence up to 9 s, standing still up to 3 s, and a usual pause of 2.5 s."""
    assert Beat.last(4) == Beat(4, 0, "", 0, {}, "", False, *[math.inf] * 3, 0.0)
    first = replace(USUAL, still_seconds=2.0, silent_seconds=9.0, stall_seconds=1.0, p99_seconds=0.25)
    other = replace(USUAL, still_seconds=3.0, silent_seconds=1.0, stall_seconds=2.75, p99_seconds=2.5)
    for beats in ([first, other], [other, first]):
        watch = HangWatch(2, 0.5)
        found = [watch.look(each, 0.5) for each in beating(beats, 8)]
        assert found[:7] == [None] * 7 and found[7].reason == (
            "without progress (the limit is 3 s, and steps usually pause for at most 2.5 s)"
        )
        watch = HangWatch(2, 0.5)
        looks = [(watch.look(each, 0.5), watch.stall(each)) for each in beating(beats, 7, silent=(1,))]
        assert [stall is not None for _, stall in looks] == 6 * [False] + [True]  # later than 2.75 s
        assert looks[6][1].ranks == (1,) and looks[6][1].is_silent
        assert describe_stall(looks[6][1], beats, {}).endswith(". The ranks end if it lasts 3 s")
        watch = HangWatch(2, 0.5)  # one is silent for the last 1.5 s of the 3 s
        rounds = [*beating(beats, 4), *([replace(beats[0], number=9 + more), beats[1]] for more in range(3))]
        rounds[4:] = [[one, rounds[3][1]] for one, _ in rounds[4:]]
        looks = [(watch.look(each, 0.5), watch.stall(each)) for each in rounds]
        assert looks[6][1].ranks == () and not looks[6][1].is_silent
        short = [replace(beat, silent_seconds=min(beat.silent_seconds, 1.5)) for beat in beats]
        watch = HangWatch(2, 0.5)
        found = [watch.look(each, 0.5) for each in beating(short, 5, silent=(0,))]
        assert [hang is not None for hang in found] == 4 * [False] + [True] and found[4].ranks == (0,)


def test_a_job_with_a_rank_that_sends_no_more_is_not_judged():
    assert watched(beating([USUAL, Beat.last(1)], 200)) is None


def test_limits_are_passed_and_not_only_reached():
    """A pause of two beats at most is counted at a look; silence of four beats is not yet that of a frozen
    rank, and the cause is then looked for among those that beat. A job stands still for five at the least,
    so that a frozen rank is known by then, however short the limit and however far apart the beats.
    """
    watch = HangWatch(2, 0.5)
    two = [replace(USUAL, still_seconds=3.0, silent_seconds=9.0)] * 2
    watch.look(two, 0.5)
    assert [watch.look(two, 5.0) for _ in range(3)] == [None] * 3  # 3 s
    assert watch.look(two, 0.001).seconds == pytest.approx(3.001)
    watch = HangWatch(2, 0.5)
    two = [replace(USUAL, still_seconds=1.9, silent_seconds=9.0)] * 2
    watch.look(two, 0.5)
    found = [
        watch.look([replace(two[0], number=min(look, 3)), replace(two[1], number=look)], 0.5)
        for look in range(2, 10)
    ]
    assert found[:5] == [None] * 5
    assert [(hang.is_silent, hang.ranks) for hang in found[5:]] == [(False, ()), (True, (0,)), (True, (0,))]


# Four ranks stand still: their beats, which are silent, after how many seconds the cause is named, the cause.
WAITING, AT_DATA = USUAL, replace(USUAL, is_inside=False, at="kielo/train/feed.py:86 in take")
STALLS = {
    "a rank that is stuck": ([WAITING, AT_DATA, WAITING, WAITING], (), 6.5, (1,)),
    "a frozen rank": ([WAITING] * 4, (2,), 6.5, (2,)),
    "short steps: five beats": ([replace(WAITING, stall_seconds=0.3)] * 4, (2,), 3.0, (2,)),
    "a save": ([*[WAITING] * 3, replace(WAITING, stall_seconds=math.inf)], (), None, ()),
    "a hang that is found as soon": ([replace(WAITING, still_seconds=6.0)] * 4, (), None, ()),
}


@pytest.mark.parametrize("case", STALLS)
def test_the_cause_of_a_pause_is_named_within_three_times_the_usual_one(case):
    """Before the limit of a hang, whose floor is made for slow files; and no more when the steps go on."""
    beats, silent, seconds, cause = STALLS[case]
    watch, told = HangWatch(4, 0.5), {}
    for look, heard in enumerate(beating(beats, 20, silent)):
        if watch.look(heard, 0.5) is None and (stall := watch.stall(heard)) is not None:
            told.setdefault(look * 0.5, stall)
    assert min(told, default=None) == seconds
    if told:
        assert told[seconds].ranks == cause and told[seconds].is_silent == bool(silent)
        message = describe_stall(told[seconds], beats, {cause[0]: "nid7 (process 12)"})
        usual = "without progress (steps usually pause for at most 2 s)"
        assert message.startswith(f"{seconds:.1f} s {usual}. The cause: rank ")
        assert f"rank {cause[0]} on nid7 (process 12) at {beats[cause[0]].at}, while ranks 0, " in message
        assert "The ranks end if it lasts 30 s" in message
    moved = [replace(beat, number=100, moves=11) for beat in beats]
    assert watch.look(moved, 0.5) is None and watch.stall(moved) is None


def test_limits_follow_the_steps_and_know_what_is_long(monkeypatch):
    """Steps may stand still for the floor beyond their usual pauses; long work has its own limits."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress(floor_seconds=30.0, silent_seconds=15.0, first_seconds=1800.0, later_seconds=600.0)

    def has_changed() -> bool:
        """Asks as the heartbeat does."""
        changed = progress.has_changed.is_set()
        progress.has_changed.clear()
        return changed

    assert progress.limits() == (1800.0, 600.0)
    progress.begin(STEPS)
    for step in range(1, 601):
        now += 20.0 if step % 50 == 0 else 2.0  # 2 %: the percentile is one of them
        progress.step_done(step)
    assert progress.limits() == (50.0, 15.0)
    assert has_changed() and not has_changed()
    with progress.during("a save"):
        assert progress.limits() == (1800.0, 600.0) and has_changed()
        now += 300.0
    assert progress.limits() == (50.0, 15.0) and has_changed()  # the save counts as no step
    with progress.during("a save"):
        assert progress.limits() == (900.0, 600.0)
    # short steps: the floor; middling ones: three times as long; long ones: the floor longer
    assert [stuck_seconds(p99, 30.0) for p99 in (1.0, 12.0, 26.0)] == [30.0, 36.0, 56.0]


def test_limits_follow_the_pauses_inside_steps(monkeypatch):
    """Steps of 26 s with marks 2 s apart: the limit is that of steps of 2 s. A long wait is a pause."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress(floor_seconds=4.0, silent_seconds=2.0, first_seconds=1800.0, later_seconds=600.0)
    progress.begin(STEPS)
    assert progress.stall_seconds == math.inf
    for step in range(1, 20):
        for _ in range(12):
            now += 2.0
            progress.mark()
        now += 2.0
        progress.step_done(step)
    assert progress.p99_seconds == 2.0 and progress.limits() == (6.0, 2.0)
    assert progress.stall_seconds == 6.0
    with progress.during("a save"):
        assert progress.stall_seconds == math.inf
    assert progress.marks() == 19 * 13
    now += 7.0  # a reader, say
    progress.mark()
    now += 1.0
    progress.step_done(20)
    assert progress.p99_seconds == 7.0


class Passed:
    """An event of a device, which the device has passed or not."""

    def __init__(self):
        self.is_passed = False

    def query(self) -> bool:
        return self.is_passed


def test_a_mark_of_a_device_counts_when_the_device_has_passed_it():
    """The host of a GPU is ahead; what it has asked for is no progress."""
    progress = Progress(30.0, 15.0, 120.0, 1.0)
    events = [Passed() for _ in range(3)]
    for event in events:
        progress.mark_after(event.query)
    assert progress.marks() == 0
    events[0].is_passed = events[2].is_passed = True  # the third cannot be passed before the second
    assert progress.marks() == 1 and progress.marks() == 1
    events[1].is_passed = True
    assert progress.marks() == 2
    while progress.takes_events:
        progress.mark_after(Passed().query)
    assert progress.marks() == 2


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Linear(3, 3), "1": nn.Linear(3, 3)})


def test_layers_are_marks_on_the_way_forward_and_back():
    model, progress = TwoLayers(), Progress(30.0, 15.0, 120.0, 1.0)

    def pass_through(x: torch.Tensor) -> torch.Tensor:
        return model.layers["1"](model.layers["0"](x))

    with marked_layers(model, torch.device("cpu"), progress):
        y = pass_through(torch.ones(1, 3, requires_grad=True))
        assert progress.marks() == 2
        y.sum().backward()
        assert progress.marks() == 4
        with torch.no_grad():
            pass_through(torch.ones(1, 3))
        assert progress.marks() == 6
    pass_through(torch.ones(1, 3))
    assert progress.marks() == 6


@pytest.mark.parametrize(
    ("hang", "ranks", "expected"),
    [
        (20.0, 8, 15.0),
        (20.0, 1000, 15.0),
        (20.0, 1024, 15.36),
        (20.0, 6144, 92.16),
        (3.0, 2, 3.0),
        (3.0, 1024, 15.36),
    ],
)
def test_silence_is_noticed_after_15_beats_or_15_seconds(hang, ranks, expected):
    """After 15 beats where they take longer than 15 s, as docs/training.md says; else after 15 s, or the
    recipe's seconds where they are fewer.
    """
    assert silent_seconds(hang, ranks) == pytest.approx(expected)


def test_a_beat_of_a_large_job_is_small():
    """Less than 1 KB on one of 6,144 ranks, whose groups were spelled out in 30 KB; a group has one key."""
    groups = [range(6144), range(0, 6144, 8), range(0, 6144, 64), range(8), range(0, 64, 8)]
    entered = {group_key(group): 123_456 for group in groups}
    beat = replace(USUAL, entered=entered, moves=10**9, at="x" * 200, still_seconds=math.inf)
    assert len(entered) == 5 and len(beat.text().encode()) < 1000 and Beat.read(beat.text()) == beat
    assert group_key([1, 23]) == group_key((1, 23)) != group_key([12, 3])
