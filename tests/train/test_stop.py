"""Deliberate stops, without ranks: what a signal, a file, a step limit or a cause asks of the run."""

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kielo.train import signals
from kielo.train import stop as stop_module
from kielo.train.signals import Presses, give_signals_back, take_over_signals
from kielo.train.stop import Stop, StoppedBeforeTraining
from tests.train.test_guard import OneStepLate

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """What the other ranks want, [stop, save], which the all-reduce adds."""
    wanted = [[0.0, 0.0]]
    add = SimpleNamespace(all_reduce=lambda of: of.add_(torch.tensor(wanted[0][: len(of)])))
    monkeypatch.setattr(stop_module, "dist", add)
    return wanted


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written to stderr."""
    texts: list[str] = []

    def write(file: int, text: bytes) -> None:
        texts.append(f"{file}{text.decode()}")

    def end(code: int) -> None:
        texts.append(f"exit {code}")

    monkeypatch.setattr(stop_module, "os", SimpleNamespace(write=write, _exit=end))
    return texts


def test_any_rank_stops_or_saves_all(others: list[list[float]]) -> None:
    stop = Stop()
    assert not stop.agreed(1) and not stop.is_save_agreed
    for asked, stopping, saving in (
        ([1.0, 0.0], True, False),
        ([0.0, 2.0], False, True),
        ([1, 1], True, True),
    ):
        others[0] = asked
        assert (stop.agreed(1), stop.is_save_agreed) == (stopping, saving)
    others[0] = [0.0, 0.0]
    assert not stop.agreed(2) and not stop.is_save_agreed
    stop.ask("memory")
    stop.ask("disk")
    assert stop.agreed(3) and stop.cause == "memory"


def test_the_step_limit_holds_from_its_step_on() -> None:
    stop = Stop(step_limit=3)
    assert [stop.is_at_limit(step) for step in (2, 3, 4)] == [False, True, True]
    assert [stop.agreed(step) for step in (2, 3)] == [False, True]
    assert not Stop().is_at_limit(10**9)


def test_on_a_gpu_the_ranks_agree_a_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_module, "DelayedReader", OneStepLate)
    stop = Stop(step_limit=5)
    stop.use(torch.device("cpu"))
    assert not stop.agreed(1)
    stop.ask("")
    assert [stop.agreed(2), stop.agreed(3)] == [False, True]


def test_files_ask_for_a_stop_or_a_save(said: list[str]) -> None:
    """A stop is told once, by the rank that tells; a save is agreed once for each look that finds it."""
    looks = iter([(False, False), (False, True), (False, False), (True, False), (True, True), (False, False)])
    stop = Stop(is_telling=True, triggers=SimpleNamespace(look=lambda: next(looks)))
    found = [(stop.agreed(step), stop.is_save_agreed) for step in range(6)]
    assert found == [
        (False, False),
        (False, True),
        (False, False),
        (True, False),
        (True, True),
        (True, False),
    ]
    assert said == ["2\nkielo: triggers/stop: finishing the step and saving\n"]


@pytest.mark.parametrize("by", ["a file of this rank", "another rank"])
def test_long_work_between_steps_settles_a_stop(
    by: str, others: list[list[float]], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, also on a GPU, on each rank. A save that is asked for meanwhile is agreed after the step."""
    monkeypatch.setattr(stop_module, "DelayedReader", OneStepLate)
    is_own = by == "a file of this rank"
    looks = iter([(False, True), (is_own, False)] + 3 * [(False, False)])
    stop = Stop(triggers=SimpleNamespace(look=lambda: next(looks)))
    stop.use(torch.device("cpu"))
    assert not stop.settle() and not stop.wanted
    others[0] = [0.0 if is_own else 1.0, 0.0]
    assert stop.settle() and stop.wanted and stop.is_settled
    others[0] = [0.0, 0.0]
    assert stop.agreed(1) and not stop.is_save_agreed
    assert stop.agreed(2) and stop.is_save_agreed
    assert stop.agreed(3) and not stop.is_save_agreed


def test_a_signal_asks_for_a_stop_and_a_second_press_ends_at_once(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers are given back. Only SIGINT can be pressed again; one rank tells."""
    before = [signal.getsignal(number) for number in NUMBERS]
    now = [50.0]
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for is_telling in (True, False):
        with Stop(is_telling=is_telling) as stop:
            stop.use(torch.device("cpu"))
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.wanted
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            now[0] += 1.0
            os.kill(os.getpid(), signal.SIGINT)  # the same press, which arrives twice
            now[0] += 0.1
            os.kill(os.getpid(), signal.SIGINT)
        assert [signal.getsignal(number) for number in NUMBERS] == before
    ended = "ended at once, unsaved. The same command resumes from the newest checkpoint"
    finishing = "SIGUSR1: finishing the step and saving"
    assert said == [f"2\nkielo: {finishing}\n", f"2\nkielo: {ended}\n", "exit 130", "exit 130"]
    said.clear()
    with Stop(is_telling=True) as stop:
        stop.use(torch.device("cpu"))
        os.kill(os.getpid(), signal.SIGINT)
    assert said == ["2\nkielo: SIGINT: finishing the step and saving. Ctrl-C again ends at once, unsaved\n"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_while_the_ranks_meet_ends_the_attempt(number: int) -> None:
    """Once: there is nothing to save, and the meeting may last for minutes."""
    before = signal.signal(number, signal.SIG_DFL)  # SIGHUP is ignored if the tests run under nohup
    try:
        with Stop() as stop:
            with pytest.raises(StoppedBeforeTraining):
                os.kill(os.getpid(), number)
                time.sleep(1)
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(number, before)
    assert stop.wanted


def test_only_ctrl_c_is_pressed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    presses = Presses()
    for number in (signal.SIGTERM, signal.SIGHUP):
        assert not presses.is_second(number)
        now[0] += 5.0
    assert not presses.is_second(signal.SIGINT)
    assert not presses.is_second(signal.SIGTERM)
    now[0] += 2.0
    assert presses.is_second(signal.SIGINT)


def test_signals_that_are_ignored_stay_ignored() -> None:
    """As under nohup: SIGINT and SIGHUP; SIGTERM and SIGUSR1 are taken over all the same."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    noted: list[Any] = []
    try:
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)
        taken = take_over_signals(lambda number, frame: noted.append(number))
        assert taken == {signal.SIGTERM: signal.SIG_IGN, signal.SIGUSR1: signal.SIG_IGN}
        for number in NUMBERS:
            os.kill(os.getpid(), number)
        assert noted == [signal.SIGTERM, signal.SIGUSR1]
        give_signals_back(taken)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert set(take_over_signals(lambda number, frame: None)) == set(NUMBERS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
