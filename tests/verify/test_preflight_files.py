"""Sizes of `kielo preflight`, its files and room for checkpoints, and its verdict as text, by hand."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kielo.artifact.verify_results import CheckReport, Complaint, NodeVerdict, Preflight
from kielo.verify.preflight import files
from kielo.verify.preflight.check_nodes import CHECKS
from kielo.verify.preflight.job import CLOCK_ROUNDS, FILE_CHUNK_BYTES, SIZES, STEPS, Job, Sizes, spread
from kielo.verify.screens import check_rows, verdict_lines
from tests.verify.made_job import job, told

CPU = torch.device("cpu")


def test_sizes_of_the_checks() -> None:
    """Of GPUs, of CPUs, and what both have: this table is what docs promise a preflight computes."""
    assert SIZES["cuda"] == Sizes(
        matrix=8192, products=40, copy_bytes=1024**3, copies=20, rounds=5,
        message_bytes=(1024, 1024**2, 128 * 1024**2), timed_collectives=5, file_bytes=512 * 1024**2,
    )  # fmt: skip
    assert SIZES["cpu"] == Sizes(
        matrix=256, products=20, copy_bytes=4 * 1024**2, copies=4, rounds=5, message_bytes=(1024, 256 * 1024),
        timed_collectives=3, file_bytes=4 * 1024**2,
    )  # fmt: skip
    assert (FILE_CHUNK_BYTES, STEPS, CLOCK_ROUNDS) == (1024**2, 5, 3)


def test_the_order_of_the_checks() -> None:
    assert [check.name for check in CHECKS] == [
        "software", "clock", "binding", "device", "collectives", "network", "files", "training",
    ]  # fmt: skip


def test_a_job_knows_its_nodes() -> None:
    """In the order of their first ranks; the lowest rank of a node works for it."""

    def of(rank: int) -> Job:
        world = SimpleNamespace(rank=rank, device=CPU)
        return Job(None, None, None, world, None, None, tuple("baab"), Path())

    assert of(0).ranks_of_nodes() == {"b": [0, 3], "a": [1, 2]}
    assert [of(rank).is_first_of_node for rank in range(4)] == [True, True, False, False]
    assert of(0).sizes is SIZES["cpu"] and of(0).device_card is None
    assert (spread([2.0, 1.234, 3.5], "m"), spread([2.001, 2.0], "m")) == ("1.23 to 3.5 m", "2 m")


def placed(**changes: Any) -> SimpleNamespace:
    usual = {"every": 0, "newest": 2, "state": "fp32", "steps": 1000} | changes
    return SimpleNamespace(
        identity=SimpleNamespace(
            total_steps=usual["steps"],
            train=SimpleNamespace(optimiser="adamw", optimiser_state=usual["state"]),
        ),
        placement=SimpleNamespace(
            checkpoint=SimpleNamespace(keep_every_steps=usual["every"], keep_newest=usual["newest"]),
            parameters=1000, world_size=16,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "number", "bytes_each"),
    [({}, 3, 12), ({"every": 300}, 6, 12), ({"newest": 4, "state": "bf16"}, 5, 8), ({"every": 1000}, 4, 12)],
)
def test_room_for_checkpoints(changes: dict[str, Any], number: int, bytes_each: int) -> None:
    """Those that are kept and one that is written, of a weight and two moments; 16 files of ranks and 8."""
    assert files.room_needed(placed(**changes)) == (number * 1000 * bytes_each, number * 24)


def test_too_little_room_is_told_by_number() -> None:
    on = job(resolved=placed())  # 36,000 bytes in 72 files
    enough = {"complaint": "", "free_bytes": 36_000, "free_inodes": 72}
    assert files.judge([enough, {}, enough | {"free_inodes": None}, {}], on) == []
    found = [enough | {"free_bytes": 35_999}, {}, enough | {"free_inodes": 71}, {"complaint": "broken"}]
    assert told(files.judge(found, on)) == [
        (3, "broken", True),
        (0, "run: the run's checkpoints need 3.6e-05 GB, and 3.6e-05 GB are free", True),
        (2, "run: the run's checkpoints need 72 files, and 71 inodes are free", True),
    ]
    rates = {"write_gb_per_second": 1.5, "read_gb_per_second": 2.5}
    some = [enough | rates, {}, enough | {"free_bytes": 5_000_000_000} | rates]
    assert files.summarise(some, on) == "write 1.5 GB/s, read 2.5 GB/s, 3.6e-05 GB free, 3.6e-05 GB needed"
    assert files.summarise([{}], on) == "no free space known, 3.6e-05 GB needed"


def test_a_chunk_holds_its_numbers_everywhere() -> None:
    chunk = files.chunk_of(3, 258)
    assert len(chunk) == 1024**2
    assert {chunk[place : place + 16] for place in range(0, 1024**2, 16)} == {
        (3).to_bytes(8, "little") + (258).to_bytes(8, "little")
    }


def alone(folder: Path) -> SimpleNamespace:
    world = SimpleNamespace(rank=0, size=1)
    host = SimpleNamespace(gather=lambda given: [given])
    return job("a", world=world, run_folder=folder, host=host, is_first_of_node=True,
               sizes=SimpleNamespace(file_bytes=3 * 1024**2))  # fmt: skip


def test_files_are_written_and_read_whole(tmp_path, monkeypatch) -> None:
    """A node alone reads its own file, and all is removed; what is not as it was written is refused."""
    ticks = iter([10.0, 12.0, 20.0, 21.5, *[0.0] * 20])
    monkeypatch.setattr(files.time, "perf_counter", lambda: next(ticks))
    found = files.measure(alone(tmp_path))
    assert found["complaint"] == "" and found["free_bytes"] > 0 and not list(tmp_path.iterdir())
    assert found["write_gb_per_second"] == pytest.approx(3 * 1024**2 / 2 / 1e9)
    assert found["read_gb_per_second"] == pytest.approx(3 * 1024**2 / 1.5 / 1e9)
    sound, numbers = files.chunk_of, []

    def wrong_in_the_end(number: int, chunk: int) -> bytes:
        numbers.append((number, chunk))
        return sound(number, chunk) if len(numbers) != 3 else sound(number, chunk)[:-1] + b"x"

    monkeypatch.setattr(files, "chunk_of", wrong_in_the_end)
    monkeypatch.setattr(files.time, "perf_counter", lambda: len(numbers) + 1.0)
    found = files.measure(alone(tmp_path))
    path = tmp_path / ".preflight.kielo" / "0"
    assert found["complaint"] == f"{path}: part 2 of 3 is not what was written"
    assert numbers == [(0, chunk) for chunk in (0, 1, 2)] * 2


def test_free_room_is_that_of_users(tmp_path, monkeypatch) -> None:
    """Blocks times their size; inodes where the file system counts them."""
    for files_there, free in ((100, 3), (0, None)):
        given = SimpleNamespace(f_bavail=10, f_bfree=99, f_frsize=4096, f_bsize=1, f_files=files_there,
                                f_favail=3, f_ffree=50)  # fmt: skip
        monkeypatch.setattr(os, "statvfs", lambda path, given=given: given)
        found = files.measure(alone(tmp_path))
        assert (found["free_bytes"], found["free_inodes"]) == (40_960, free)


def complaint(number: int, is_refusal: bool = True, **changes: Any) -> Complaint:
    usual = {"check": "clock", "rank": number, "node": f"n{number}", "message": "late"}
    return Complaint(**(usual | changes), is_refusal=is_refusal)


def verdict_of(good: int, bad: int, complaints: list[Complaint], **changes: Any) -> Preflight:
    nodes = [NodeVerdict(name=f"n{one}", ranks=[one], passed=one >= bad) for one in range(good + bad)]
    usual = {
        "passed": not bad, "bad_nodes": [node.name for node in nodes if not node.passed], "nodes": nodes,
        "complaints": complaints, "checks": [], "ranks": 16, "seconds": 12.34, "finished_at": "",
    }  # fmt: skip
    return Preflight(**(usual | changes))


def test_lines_of_the_verdict() -> None:
    """Up to 20 complaints and 8 names."""
    assert verdict_lines(verdict_of(2, 1, [complaint(0), complaint(1, False)])) == [
        "n0: rank 0: clock: late", "n1: rank 1: clock (warning): late", "2 nodes passed: n1, n2",
        "1 node REFUSED: n0",
    ]  # fmt: skip
    assert verdict_lines(verdict_of(1, 0, [])) == [
        "1 node passed: n0",
        "all checks passed: 16 ranks in 12.3 s",
    ]
    of_job = complaint(0, rank=None, node=None, check="training")
    assert verdict_lines(verdict_of(1, 0, [of_job], passed=False)) == [
        "the job: training: late", "1 node passed: n0", "the job is REFUSED, and no node is to blame",
    ]  # fmt: skip
    warned = complaint(0, False, rank=None, node=None)
    assert verdict_lines(verdict_of(1, 0, [warned]))[0] == "the job: clock (warning): late"
    assert "no node passed" not in str(verdict_lines(verdict_of(0, 1, [])))
    assert verdict_lines(verdict_of(0, 2, []))[-1] == (
        "no node passed. Fix: look for a shared cause before you leave nodes out"
    )
    assert len(verdict_lines(verdict_of(8, 0, [complaint(one) for one in range(20)]))) == 22
    lines = verdict_lines(verdict_of(9, 0, [complaint(one) for one in range(22)]))
    assert lines[20:22] == [
        "and 2 more in preflight.json", "9 nodes passed: n0, n1, n2, n3, n4, n5, n6, n7 and 1 more",
    ]  # fmt: skip
    assert verdict_lines(verdict_of(8, 0, []))[0] == "8 nodes passed: n0, n1, n2, n3, n4, n5, n6, n7"


def test_rows_of_the_checks() -> None:
    """Refused, warned, well, or not run."""
    reports = [CheckReport(name=name, summary=f"of {name}", seconds=1.26, found=found)
               for name, found in (("a", [1]), ("b", [1]), ("c", [1]), ("d", []))]  # fmt: skip
    complaints = [complaint(0, check="a"), complaint(1, False, check="a"), complaint(0, False, check="b")]
    assert check_rows(verdict_of(1, 0, complaints, checks=reports)) == [
        ["a", "of a", "1.3", "REFUSED"], ["b", "of b", "1.3", "warning"], ["c", "of c", "1.3", "ok"],
        ["d", "of d", "1.3", ""],
    ]  # fmt: skip
