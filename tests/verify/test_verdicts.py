"""Verdicts and tables of the round trip and of position heads, and the order of a preflight, by hand."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.artifact.stage_json import read_json
from kielo.artifact.verify_results import CheckReport, Complaint, Preflight
from kielo.checkpoint.agreement import Agreement
from kielo.ranks.communicator import NoCommunicator
from kielo.ranks.local_ranks import name_of_this_node
from kielo.recipe.errors import KieloError
from kielo.verify import round_trip, source_folder
from kielo.verify.preflight import check_nodes
from kielo.verify.preflight.check_nodes import run_checks
from kielo.verify.preflight.job import Check, Finding, Job


def tensor(dtype: str, size: int, sha256: str = "0123456789abcdef0123") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [3, 5], "bytes": size, "sha256": sha256}


TENSORS = {"a": tensor("F32", 1200), "b": tensor("BF16", 600), "c": tensor("BF16", 40_000)}


def test_a_round_trip_in_words() -> None:
    """A row for each dtype; the first tensor that differs, as it is on both sides."""
    result = {"passed": True, "tensors": TENSORS, "differences": {}, "source": "/some/folder"}
    titles, rows = round_trip.table(result)
    assert titles == ["dtype", "tensors", "bytes", "different"]
    assert rows == [("BF16", 2, "40,600", 0), ("F32", 1, "1,200", 0)]
    assert round_trip.verdict(result) == (
        "Round trip holds: name, dtype, shape and bytes of all 3 tensors equal /some/folder."
    )
    result |= {"passed": False, "differences": {"c": None, "b": tensor("F32", 1), "new": tensor("I8", 1)}}
    assert round_trip.table(result)[1] == [("BF16", 2, "40,600", 2), ("F32", 1, "1,200", 0)]
    assert round_trip.verdict(result) == (
        "NO round trip: 3 of 3 tensors differ; first c: BF16 [3, 5] sha256 0123456789abcdef… in the source, "
        "missing in the export."
    )
    result["differences"] = {"new": tensor("I8", 1)}
    assert round_trip.verdict(result) == (
        "NO round trip: 1 of 3 tensors differ; first new: missing in the source, I8 [3, 5] sha256 "
        "0123456789abcdef… in the export."
    )


def test_position_heads_in_words() -> None:
    """The other way is named where it has the lower loss, with the key of the file that says so."""
    result = {"taken": "x", "losses": {"x": 2.0, "y": 2.5}, "passed": True, "source": "/some"}
    said = "position_heads = 'x', which Kielo takes for these files, has the lower loss."
    assert source_folder.position_heads_verdict(result) == said
    result |= {"losses": {"x": 2.5, "y": 2.0}, "passed": False}
    assert source_folder.position_heads_verdict(result) == (
        "Kielo takes position_heads = 'x' for these files, and 'y' has the lower loss. Fix: "
        '"position_heads": "y" in /some/config.json'
    )


class Stub:
    """A check of one rank, which notes when it measures."""

    def __init__(self, name: str, findings: list[Finding] | None = None, error: Exception | None = None):
        self.check = Check(name, self.measure, lambda found, job: findings or [], self.summarise)
        self.times, self.error = 0, error

    def measure(self, job: Job) -> str:
        self.times += 1
        if self.error is not None:
            raise self.error
        return "measured"

    def summarise(self, found: Any, job: Job) -> str:
        return f"{found[0]} once"


def checked(folder: Path, *stubs: Stub, nodes: tuple[str, ...] = ("n0",)) -> tuple[bool, Preflight]:
    world = SimpleNamespace(rank=0, size=len(nodes))
    job = Job(None, None, None, world, None, Agreement(), nodes, folder)
    has_passed = run_checks(job, [stub.check for stub in stubs])
    return has_passed, read_json(folder, Preflight)


def test_checks_run_in_order_and_their_findings_are_kept(tmp_path: Path, monkeypatch) -> None:
    """Refusals come first; a warning refuses nobody. Seconds are by a clock that counts in whole ones."""
    ticks = iter([10.0, 20.0, 21.5, 30.0, 32.25, 50.0])
    monkeypatch.setattr(check_nodes.time, "monotonic", lambda: next(ticks))
    warned, refused = (
        Stub("a", [Finding(0, "odd", False)]),
        Stub("b", [Finding(0, "broken"), Finding(None, "x")]),
    )
    has_passed, found = checked(tmp_path, warned, refused)
    assert has_passed is found.passed is False and found.bad_nodes == ["n0"]
    assert [(one.check, one.rank, one.node, one.message, one.is_refusal) for one in found.complaints] == [
        ("b", 0, "n0", "broken", True), ("b", None, None, "x", True), ("a", 0, "n0", "odd", False),
    ]  # fmt: skip
    assert found.checks == [
        CheckReport(name="a", summary="measured once", seconds=1.5, found=["measured"]),
        CheckReport(name="b", summary="measured once", seconds=2.25, found=["measured"]),
    ]
    assert (found.ranks, found.seconds) == (1, 40.0)
    assert found.nodes[0].content() == {"name": "n0", "ranks": [0], "passed": False}
    assert (tmp_path / "bad_nodes.txt").read_text() == "n0\n"


def test_a_job_with_warnings_alone_passes(tmp_path: Path) -> None:
    has_passed, found = checked(tmp_path, Stub("a", [Finding(0, "odd", False)]))
    assert has_passed is found.passed is True and found.bad_nodes == [] and found.nodes[0].passed
    assert (tmp_path / "bad_nodes.txt").read_text() == ""
    assert checked(tmp_path)[0] is True


@pytest.mark.parametrize(
    ("error", "said"), [(ValueError("one\ntwo"), "ValueError: one"), (KeyError("k"), "KeyError: 'k'")]
)
def test_nothing_runs_after_a_check_that_raised(tmp_path: Path, error: Exception, said: str) -> None:
    """The ranks are out of step; its rank is refused with the first line of the error."""
    broken, after = Stub("a", error=error), Stub("b")
    has_passed, found = checked(tmp_path, broken, after)
    assert not has_passed and (broken.times, after.times) == (1, 0)
    complaint = Complaint(
        check="a", rank=0, node="n0", message=f"the check ended with an error: {said}", is_refusal=True
    )
    assert found.complaints == [complaint] and found.checks[0].summary == "ended with an error"
    assert found.checks[0].found == [None]
    assert found.checks[1] == CheckReport(name="b", summary="not run", seconds=0.0, found=[])


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Returns a function that runs a preflight whose world and checks are stand-ins; it has what they saw."""

    def preflight(device: str, host_group: str | None = None, during: Any = None, start: Any = None) -> Any:
        preflight.jobs, preflight.limits, preflight.ended = [], [], []
        world = SimpleNamespace(rank=0, size=1, timeout_seconds=7.0)

        def checks(job: Job) -> str:
            preflight.jobs.append(job)
            if during is not None:
                during(job)
            return "the verdict"

        for name, stand_in in {
            "start_world": start or (lambda seconds, of_device: world),
            "build_mesh": lambda of, layout: "mesh",
            "make_host_group": lambda of, name, seconds: host_group, "communicators": lambda mesh: ["axis"],
            "TimeLimits": lambda *given: preflight.limits.append(given), "run_checks": checks,
            "Agreement": lambda group: Agreement(), "end_world": lambda: preflight.ended.append("ended"),
            "cluster": lambda name: "the cluster",
        }.items():  # fmt: skip
            monkeypatch.setattr(check_nodes, name, stand_in)
        placement = SimpleNamespace(
            device=device, layout="layout", world_size=1, train=SimpleNamespace(start_timeout_seconds=7.0)
        )
        resolved, recipe = SimpleNamespace(placement=placement), SimpleNamespace(cluster="c")
        return check_nodes.preflight(recipe, resolved, tmp_path)

    return preflight


@pytest.mark.parametrize("is_own", (True, False))
def test_the_log_that_nccl_was_asked_for_goes(started, monkeypatch, tmp_path, is_own: bool) -> None:
    """But not a person's; none is asked for on CPUs. Each wait of a rank has a limit."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = tmp_path / f"kielo_nccl_{os.getpid()}.log"
    log.write_text("NCCL INFO")
    for name in ("NCCL_DEBUG_FILE", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if not is_own:
        monkeypatch.setenv("NCCL_DEBUG_FILE", str(log))
    assert started("cpu") == "the verdict" and started.jobs[0].nccl_log is None and log.exists()
    assert started.limits == [(["axis"], 120.0, 120.0)] and started.ended == ["ended"]
    seen: list[bool] = []
    assert started("cuda", "host", lambda job: seen.append(job.nccl_log == log and log.exists()))
    assert seen == [True] and log.exists() is not is_own
    assert started.limits == [(["axis"], 120.0, 120.0), (["host"], 300.0, 300.0)]
    log.unlink(missing_ok=True)
    assert started("cuda") and started.ended == ["ended"]
    with pytest.raises(OSError, match="odd"):
        started("cpu", None, lambda job: (_ for _ in ()).throw(OSError("odd")))
    assert started.ended == ["ended"]


def test_the_verdict_before_goes_when_a_preflight_begins(started, tmp_path) -> None:
    """Not a file of somebody else, who is told before anything is removed."""
    report, bad_nodes = tmp_path / "preflight.json", tmp_path / "bad_nodes.txt"
    report.write_text('{"bad_nodes": []}')
    bad_nodes.write_text("n1\n")
    assert started("cpu", None, lambda job: (report.exists(), bad_nodes.exists()) == (False, False) or 1 / 0)
    assert not report.exists() and started("cpu")
    bad_nodes.write_text("mine")
    with pytest.raises(KieloError, match="bad_nodes.txt: exists without the preflight.json that"):
        started("cpu")
    report.write_text('{"mine": []}')
    with pytest.raises(KieloError, match="preflight.json: exists, and Kielo did not write it"):
        started("cpu")
    assert bad_nodes.read_text() == "mine" and report.exists() and started.jobs == []


def test_nodes_of_ranks_that_do_not_arrive_are_written(started, tmp_path) -> None:
    """Where they are known, and not over a file of somebody else; the error is raised as it is."""
    report, bad_nodes = tmp_path / "preflight.json", tmp_path / "bad_nodes.txt"
    hosts: tuple[str, ...] = ()

    def absent(seconds: float, device: str) -> None:
        raise NoCommunicator("rank 1 did not arrive", hosts)

    with pytest.raises(NoCommunicator, match="rank 1 did not arrive"):
        started("cpu", start=absent)
    assert not report.exists() and started.ended == ["ended"]
    hosts = ("n7", "n8")
    with pytest.raises(NoCommunicator, match="rank 1 did not arrive"):
        started("cpu", start=absent)
    found = read_json(tmp_path, Preflight)
    assert (found.passed, found.bad_nodes, found.ranks, found.seconds) == (False, ["n7", "n8"], 1, 0)
    assert [(one.check, one.node, one.is_refusal) for one in found.complaints] == [
        ("start", "n7", True), ("start", "n8", True),
    ]  # fmt: skip
    assert bad_nodes.read_text() == "n7\nn8\n"
    report.unlink()
    bad_nodes.write_text("mine")
    with pytest.raises(KieloError, match="bad_nodes.txt: exists without the preflight.json that"):
        started("cpu", start=absent)
    assert bad_nodes.read_text() == "mine" and not report.exists()


def test_the_scheduler_s_name_of_a_node(monkeypatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "nid7")
    assert name_of_this_node() == "nid7"
    monkeypatch.setenv("SLURMD_NODENAME", "")
    assert name_of_this_node() == os.uname().nodename
