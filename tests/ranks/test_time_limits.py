"""Collectives have the long limit at first and in work between steps, then the short one, on every group."""

import threading
from datetime import timedelta

import pytest

from kielo.ranks import communicator
from kielo.ranks.communicator import TimeLimits
from kielo.ranks.hang_watch import STEPS, Progress, stuck_seconds

LONG, SHORT = 90.0, 7.0


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """What torch is told: (group, seconds)."""
    found: list[tuple[str, float]] = []

    def note(limit: timedelta, group: str) -> None:
        found.append((group, limit.total_seconds()))

    monkeypatch.setattr(communicator, "_set_pg_timeout", note)
    return found


def limits_of(told: list[tuple[str, float]]) -> float:
    """The limit that both groups were given last."""
    assert [group for group, _ in told[-2:]] == ["one", "other"] and told[-2][1] == told[-1][1]
    return told[-1][1]


def test_the_short_limit_holds_after_two_steps_of_a_range(told) -> None:
    """A pause before that ends with the long limit again, one after it with the short one."""
    progress = Progress(3.0, 2.0, LONG, SHORT)
    limits = TimeLimits(("one", "other"), LONG, SHORT, progress)
    for first_step in (1, 21):
        assert limits_of(told) == LONG and progress.doing == "the build and the first steps"
        limits.step_done(first_step)
        assert limits_of(told) == LONG and progress.step == first_step
        told.clear()
        with limits.paused("a save"):
            assert limits_of(told) == LONG and progress.doing == "a save"
            told.clear()
        assert limits_of(told) == LONG and progress.doing == "the build and the first steps"
        limits.step_done(first_step + 1)
        assert limits_of(told) == SHORT and progress.doing == STEPS
        for step in (first_step + 2, first_step + 3):
            with limits.paused("a save"):
                assert limits_of(told) == LONG and progress.doing == "a save"
            assert limits_of(told) == SHORT and progress.doing == STEPS
            told.clear()
            limits.step_done(step)
            assert told == [] and progress.step == step
        limits.restart()


def test_without_a_heartbeat_the_short_limit_is_that_of_progress(told) -> None:
    limits = TimeLimits((), LONG, SHORT)
    assert limits.progress.limits()[0] == LONG
    limits.step_done(1)
    limits.step_done(2)
    assert limits.progress.limits()[0] == SHORT and told == []


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("kielo.ranks.hang_watch.time", clock)
    return clock


def take_step(progress: Progress, clock: Clock, *pauses: float) -> None:
    """A step with marks after these seconds; its end is the last of them."""
    for seconds in pauses[:-1]:
        clock.now += seconds
        progress.mark()
    clock.now += pauses[-1]
    progress.step_done(progress.step + 1)


def test_the_limits_of_steps_follow_from_their_longest_pauses(clock: Clock) -> None:
    """The 99th percentile by nearest rank, of steps alone, not of the build."""
    progress = Progress(floor_seconds=4.0, silent_seconds=2.0, first_seconds=50.0, later_seconds=6.0)
    assert (progress.doing, progress.step, progress.p99_seconds) == ("the start", 0, 0.0)
    assert progress.limits() == (50.0, 6.0)
    progress.begin("the build and the first steps")
    take_step(progress, clock, 30.0)
    assert progress.p99_seconds == 0.0 and progress.limits() == (50.0, 6.0)
    clock.now += 9.0
    progress.begin(STEPS)
    take_step(progress, clock, 1.0, 3.0, 2.0)
    assert (progress.p99_seconds, progress.step, progress.marks()) == (3.0, 2, 4)
    assert progress.limits() == (7.0, 2.0)
    for _ in range(8):
        take_step(progress, clock, 0.5)
    assert progress.stall_seconds == float("inf")  # nine steps
    take_step(progress, clock, 0.5)
    assert (progress.p99_seconds, progress.stall_seconds) == (3.0, 9.0)
    for _ in range(90):
        take_step(progress, clock, 0.5)
    assert progress.p99_seconds == 3.0  # the last of 100
    take_step(progress, clock, 0.5)
    assert progress.p99_seconds == 0.5  # the 100th of 101
    progress.begin("a save")
    assert progress.stall_seconds == float("inf")


def test_the_limit_of_long_work_is_three_times_the_longest_of_its_kind(clock: Clock) -> None:
    """At least `later_seconds`; `first_seconds` before it was done once; each kind by itself."""
    progress = Progress(floor_seconds=4.0, silent_seconds=2.0, first_seconds=50.0, later_seconds=6.0)
    progress.begin(STEPS)
    still = []
    for seconds in (1.0, 11.0, 3.0):
        progress.has_changed.clear()
        with progress.during("a save"):
            assert progress.has_changed.is_set()
            progress.has_changed.clear()
            still.append(progress.limits())
            clock.now += seconds
        assert progress.has_changed.is_set() and progress.doing == STEPS
    assert still == [(50.0, 6.0), (6.0, 6.0), (33.0, 6.0)]
    with progress.during("held-out text"):
        assert progress.limits() == (50.0, 6.0)
    take_step(progress, clock, 0.25)  # counted from the end of the long work
    assert progress.p99_seconds == 0.25


def test_short_work_has_short_limits_afterwards(clock: Clock) -> None:
    """Three times a quarter of a second; one that took longer before is remembered."""
    progress = Progress(floor_seconds=0.1, silent_seconds=2.0, first_seconds=50.0, later_seconds=0.5)
    for seconds, still in ((0.25, 50.0), (0.125, 0.75), (0.25, 0.75)):
        with progress.during("a save"):
            assert progress.limits()[0] == still
            clock.now += seconds


def test_silence_in_long_work_is_allowed_for_no_longer_than_standing_still(clock: Clock) -> None:
    progress = Progress(floor_seconds=8.0, silent_seconds=2.0, first_seconds=5.0, later_seconds=6.0)
    assert progress.limits() == (5.0, 5.0)
    with progress.during("a save"):
        pass
    progress.begin("a save")
    assert progress.limits() == (6.0, 6.0)
    progress = Progress(floor_seconds=8.0, silent_seconds=2.0, first_seconds=50.0, later_seconds=6.0)
    assert progress.limits() == (50.0, 8.0)


def test_a_wait_for_files_has_its_own_limits(clock: Clock) -> None:
    """Both limits are long in a wait, of which the rank itself has nine tenths; its end is progress."""
    progress = Progress(3.0, 2.0, 50.0, 6.0, file_seconds=9.0)
    progress.begin(STEPS)
    for _ in range(2):
        marks = progress.marks()
        with progress.at_files() as seconds:
            assert seconds == pytest.approx(9.0) and progress.limits() == pytest.approx((10.0, 10.0))
            assert progress.marks() == marks
        assert progress.limits() == (3.0, 2.0) and progress.marks() == marks + 1
    with pytest.raises(OSError), progress.at_files():
        raise OSError
    assert progress.limits() == (3.0, 2.0)
    for _ in range(2):
        take_step(progress, clock, 20.0)
    with progress.at_files() as seconds:  # steps that are slower than files
        assert progress.limits() == (23.0, pytest.approx(10.0)) and seconds == pytest.approx(0.9 * 23.0)


def test_how_long_steps_may_stand_still() -> None:
    """Three times the usual, but at most the floor longer than it, and never less than the floor."""
    found = [stuck_seconds(p99, 10.0) for p99 in (0.0, 3.0, 4.0, 5.0, 6.0, 100.0)]
    assert found == [10.0, 10.0, 12.0, 15.0, 16.0, 110.0]


class Passed:
    """An event that the device has passed, or not, or of a device that has failed."""

    def __init__(self, answer: bool | None):
        self.answer = answer

    def query(self) -> bool:
        if self.answer is None:
            raise RuntimeError("the device has failed")
        return self.answer


def test_marks_after_events_count_once_the_device_has_passed_them(clock: Clock) -> None:
    """In their order: one that is not passed holds back those after it; a failed device gives no mark."""
    progress = Progress(4.0, 2.0, 50.0, 6.0)
    events = [Passed(True), Passed(True), Passed(False), Passed(True)]
    for event in events:
        progress.mark_after(event.query)
    assert [progress.marks(), progress.marks()] == [1, 1]
    events[2].answer = True
    assert [progress.marks(), progress.marks()] == [2, 2]
    progress.mark_after(Passed(None).query)
    assert progress.marks() == 2
    for _ in range(4094):
        progress.mark_after(Passed(False).query)
    assert progress.takes_events
    progress.mark_after(Passed(False).query)
    assert not progress.takes_events


def test_another_thread_reads_while_steps_are_noted(clock: Clock) -> None:
    """Only the last 512 steps are remembered."""
    progress = Progress(4.0, 2.0, 50.0, 6.0)
    progress.begin(STEPS)
    for number in range(520):
        take_step(progress, clock, 9.0 if number < 8 else 0.5)
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(progress.p99_seconds))
    thread.start()
    thread.join()
    assert found == [0.5]
