"""All ranks get the same values or the same error; ranks are threads here."""

import errno
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kielo.checkpoint import agreement
from kielo.checkpoint.agreement import Agreement
from kielo.recipe.errors import KieloError
from tests.checkpoint.threads import run_threads


@pytest.fixture
def on_three(monkeypatch) -> Callable[[Callable[[Agreement], Any]], list[Any]]:
    """Calls an action with the agreement of each of three ranks: their results or errors."""
    ranks = partial(run_threads, monkeypatch, [agreement], 3)
    return lambda action: ranks(lambda group: action(Agreement(group)))


def failing(error: Exception) -> Any:
    raise error


def test_values_of_all_ranks(on_three) -> None:
    assert on_three(lambda ranks: ranks.gather(10 * ranks.rank + ranks.size)) == [[3, 13, 23]] * 3


def test_what_the_first_rank_does(on_three) -> None:
    """Once; its error is that of all, and has its cause where it came from."""
    done = []
    assert on_three(lambda ranks: ranks.on_first(lambda: done.append(ranks.rank) or "made")) == ["made"] * 3
    assert done == [0]
    for error, told in (
        (KieloError("why"), "why"),
        (
            OSError(errno.EIO, "broken", "f"),
            "f: broken; the disk or its network failed: the system's log (dmesg) says more",
        ),
    ):
        found = on_three(lambda ranks, error=error: ranks.on_first(lambda: failing(error)))
        assert [(type(one), str(one)) for one in found] == [(KieloError, told)] * 3
        assert [one.__cause__ for one in found] == [error, None, None]


def test_what_all_ranks_do(on_three) -> None:
    """The error of the first rank that has one, which is named; an OSError keeps its number and file."""
    assert on_three(lambda ranks: ranks.on_all(lambda: 2 * ranks.rank)) == [[0, 2, 4]] * 3

    def told(*errors: Exception | None) -> set[tuple[type, str]]:
        def action(ranks: Agreement) -> Any:
            error = errors[ranks.rank]
            return ranks.on_all(lambda: error and failing(error))

        return {(type(one), str(one)) for one in on_three(action)}

    broken = OSError(errno.EIO, "broken", "f")
    assert told(None, broken, KieloError("later")) == {(OSError, "[Errno 5] broken on rank 1: 'f'")}
    assert told(None, None, KieloError("why")) == {(KieloError, "why on rank 2 (KieloError)")}
    assert told(ValueError("odd"), None, broken) == {(RuntimeError, "odd on rank 0 (ValueError)")}
    assert told(None, OSError("no more"), None) == {(OSError, "[Errno None] no more on rank 1")}


def test_each_rank_gets_its_part(on_three) -> None:
    asked = []

    def divide(values: list[int]) -> list[str]:
        asked.append(values)
        return [f"part {value}" for value in values[::-1]]

    assert on_three(lambda ranks: ranks.distribute(7 + ranks.rank, divide)) == ["part 9", "part 8", "part 7"]
    assert asked == [[7, 8, 9]]
    found = on_three(lambda ranks: ranks.distribute(1, lambda values: failing(KieloError("why"))))
    assert [(type(one), str(one)) for one in found] == [(KieloError, "why")] * 3


def test_the_first_complaint_refuses_on_all(on_three) -> None:
    complaints = [None, "first", "second"]
    found = on_three(lambda ranks: ranks.refuse_together(complaints[ranks.rank]))
    assert {str(one) for one in found} == {f"first (rank 1 on {socket.gethostname()})"}
    assert on_three(lambda ranks: ranks.refuse_together(None)) == [None] * 3


def test_one_process_alone() -> None:
    """Nothing is sent, and a complaint has no rank."""
    ranks = Agreement()
    assert (ranks.distributed, ranks.rank, ranks.size) == (False, 0, 1)
    assert ranks.gather(5) == [5] and ranks.on_first(lambda: 6) == 6 and ranks.on_all(lambda: 7) == [7]
    assert ranks.distribute(3, lambda values: [values * 2]) == [3, 3]
    ranks.refuse_together(None)
    with pytest.raises(KieloError, match="^why$"):
        ranks.refuse_together("why")
    with pytest.raises(OSError, match=r"^\[Errno 5\] broken on rank 0$"):
        ranks.on_all(lambda: failing(OSError(errno.EIO, "broken")))
    with pytest.raises(ZeroDivisionError):
        ranks.on_first(lambda: 1 / 0)


def test_two_ranks_agree_as_three_do(monkeypatch) -> None:
    """One other rank is enough to be asked and told."""

    def on_two(action: Callable[[Agreement], Any]) -> list[Any]:
        return run_threads(monkeypatch, [agreement], 2, lambda group: action(Agreement(group)))

    assert on_two(lambda ranks: ranks.gather(ranks.rank)) == [[0, 1]] * 2
    assert on_two(lambda ranks: ranks.on_first(lambda: f"by {ranks.rank}")) == ["by 0"] * 2
    assert on_two(lambda ranks: ranks.distribute(5 + ranks.rank, lambda found: found[::-1])) == [6, 5]
    told = {f"why (rank 1 on {socket.gethostname()})"}
    complaints = [None, "why"]
    assert {str(one) for one in on_two(lambda ranks: ranks.refuse_together(complaints[ranks.rank]))} == told
