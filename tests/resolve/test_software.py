"""The software of a machine: what torch.compile lacks, Intel's AMX, and decay rates that bf16 can follow."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.recipe.cards import cluster
from kielo.recipe.sections import Layout
from kielo.resolve import software
from kielo.resolve.shares import coordinates, rank_of_stage
from kielo.resolve.software import BACKEND_VARIABLE, NEWEST, Software, installed, missing_compiler, planned
from kielo.resolve.stages import chunks_of


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A machine whose programs, variables and files a test sets; it has Python's headers."""
    found = SimpleNamespace(
        programs={"gcc", "g++"}, variables={}, root=tmp_path, headers=tmp_path / "include"
    )
    found.headers.mkdir()
    (found.headers / "Python.h").touch()
    finder = SimpleNamespace(which=lambda name: name if name in found.programs else None)
    monkeypatch.setattr(software, "shutil", finder)
    monkeypatch.setattr(software, "os", SimpleNamespace(environ=found.variables))
    monkeypatch.setattr(software, "sysconfig", SimpleNamespace(get_path=lambda name: str(found.headers)))
    return found


NO_GCC = (
    "this machine has no compiler (gcc), which torch.compile needs. Fix: install it (Debian and "
    "Ubuntu: apt-get install gcc)"
)


@pytest.mark.parametrize(
    ("device", "programs", "variables", "missing"),
    [
        ("cuda", {"gcc"}, {}, None), ("cuda", {"clang"}, {}, None), ("cuda", {"g++"}, {}, NO_GCC),
        ("cuda", {"icc"}, {"CC": "icc -O2"}, None), ("cuda", {"gcc"}, {"CC": "none"}, None),
        ("cuda", set(), {"CC": ""}, NO_GCC),
        ("cpu", {"g++"}, {}, None), ("cpu", {"gcc", "clang"}, {}, NO_GCC.replace("gcc", "g++")),
        ("cpu", {"icpc"}, {"CXX": "icpc -O2"}, None),
        ("cpu", {"g++"}, {"CXX": "none"}, NO_GCC.replace("gcc", "g++")),
        ("cuda", set(), {BACKEND_VARIABLE: "aot_eager"}, None),
        ("cuda", set(), {BACKEND_VARIABLE: "inductor"}, NO_GCC),
    ],
)  # fmt: skip
def test_a_compiler_is_looked_for_by_device(machine: Any, device, programs, variables, missing) -> None:
    """A C compiler for GPUs, a C++ compiler for processors; one that a variable names, and its options."""
    machine.programs = programs
    machine.variables.update(variables)
    assert missing_compiler(device) == missing


def test_headers_of_python_are_needed(machine: Any) -> None:
    (machine.headers / "Python.h").unlink()
    told = missing_compiler("cpu")
    assert told.startswith("this machine has no Python.h, which") and "apt-get install python3-dev)" in told


@pytest.mark.parametrize(
    ("flags", "has_amx"),
    [("flags : fma amx_bf16 amx_int8", True), ("flags : fma amx_bf16x", False), (None, False)],
)
def test_amx_is_among_the_flags_of_a_processor(machine: Any, monkeypatch, flags, has_amx) -> None:
    """Not where Linux lists none."""
    if flags is not None:
        (machine.root / "proc").mkdir()
        (machine.root / "proc/cpuinfo").write_text(flags)
    monkeypatch.setattr(
        software, "Path", lambda *parts: machine.root.joinpath(*parts[:-1], parts[-1].lstrip("/"))
    )
    monkeypatch.setattr(software, "version", lambda name: f"2.11 of {name}")
    assert installed("cuda") == Software("2.11 of torch", None, has_amx)


def test_a_plan_is_for_the_clusters_torch() -> None:
    site = cluster("lumi_g")
    assert planned(site.model_copy(update={"torch": "2.10"})) == Software("2.10", None, False)
    assert planned(site.model_copy(update={"torch": None})) == Software(NEWEST)


def test_ranks_differ_first_in_the_last_axis() -> None:
    """Of 2 stages, 3 replicas, 4 shards, 1 context rank and 5 tensor ranks."""
    layout = Layout(pipeline=2, replicate=3, shard=4, context=1, tensor=5)
    rank = ((1 * 3 + 2) * 4 + 1) * 5 + 3
    by_hand = {"pipeline": 1, "replicate": 2, "shard": 1, "context": 0, "tensor": 3, "expert": 0}
    assert coordinates(layout, rank) == by_hand and rank_of_stage(layout, 1) == 60


def test_chunks_are_for_tensor_ranks_that_overlap() -> None:
    """Two where it is asked for; one rank has nothing to send."""
    asked = [{"tensor": 4, "tensor_overlap": "chunked"}, {"tensor": 2, "tensor_overlap": "chunked"}]
    others = [{"tensor": 1, "tensor_overlap": "chunked"}, {"tensor": 4, "tensor_overlap": "none"}]
    assert [chunks_of(Layout(**layout)) for layout in asked + others] == [2, 2, 1, 1]
