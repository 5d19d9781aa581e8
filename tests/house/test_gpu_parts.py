"""benchmarks/gpu.py: its parts fit their time, and what did not run is no result."""

import argparse
import json
import re
import sys
import time
from pathlib import Path

import gpu
import pytest
from gpu import Command

ROOT = Path(__file__).parents[2]
NINE_MINUTES = 540


@pytest.mark.parametrize("part", gpu.PARTS)
def test_the_limits_of_a_part_are_nine_minutes_at_most(part):
    limits = [command.seconds for command in gpu.PARTS[part]]
    assert gpu.LOOK_SECONDS + sum(limits) <= NINE_MINUTES
    assert gpu.PART_SECONDS <= NINE_MINUTES
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    if part <= 4:
        assert f"\n| {part} | {gpu.LOOK_SECONDS + sum(limits)} | " in page


def test_the_files_of_the_tests_marked_gpu_are_named():
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"\bpytest\.mark\.gpu\b", path.read_text(encoding="utf-8")) and path != Path(__file__)
    }
    assert set(gpu.GPU_TESTS) == marked


def test_scripts_take_the_arguments_of_their_commands(monkeypatch):
    """One contender in each process."""
    import fp8_convergence
    import step

    for command in sum(gpu.PARTS.values(), []):
        script, *arguments = [word.replace("{seconds}", "100") for word in command.arguments]
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        if script.endswith("step.py"):
            options = step._options()
            assert options.contenders in step.contenders.NAMES and options.join
        elif script.endswith("fp8_convergence.py"):
            assert fp8_convergence._options().steps == 150


def options(**given) -> argparse.Namespace:
    return argparse.Namespace(**({"all": False, "tokens": "none", "part": 1} | given))


def test_a_part_resumes_with_what_has_no_result(monkeypatch, tmp_path, capfd):
    """The second command fails until its file is there; one that hangs is ended, with its child."""
    flag = tmp_path / "flag"
    late = f"import time; time.sleep(2); open({str(flag)!r}, 'w')"
    child = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {late!r}])"
    part = [
        Command("first", ("-c", "print('first', 'ran')"), 60),
        Command("second", ("-c", f"import os, sys; sys.exit(not os.path.exists({str(flag)!r}))"), 60),
        Command("hangs", ("-c", child + "; time.sleep(60)"), 1),
    ]
    monkeypatch.setitem(gpu.PARTS, 1, part)
    assert not gpu.run_part(1, tmp_path, time.monotonic() + 300, options())
    said = capfd.readouterr().out
    assert "first ran" in said and "1 second: NO RESULT" in said and "exit status 1" in said
    assert "1 hangs: NO RESULT" in said and "ended after 1 s" in said
    notes = json.loads((tmp_path / "gpu_parts.json").read_text())
    assert [notes[f"1 {command.name}"]["status"] for command in part] == [0, 1, 124]
    time.sleep(1.5)
    assert not flag.exists()  # the child is gone too
    flag.touch()
    monkeypatch.setitem(gpu.PARTS, 1, part[:2])
    assert not gpu.run_part(1, tmp_path, time.monotonic(), options())
    assert "1 second: NOT RUN" in capfd.readouterr().out
    assert gpu.run_part(1, tmp_path, time.monotonic() + 300, options())
    assert "first ran" not in capfd.readouterr().out


def test_tests_that_were_all_skipped_have_not_run(monkeypatch, tmp_path):
    """By pytest itself, on a machine without a GPU."""
    report = tmp_path / "report.xml"
    test = tmp_path / "test_one.py"
    text = "import pytest\n\n@pytest.mark.skipif({}, reason='needs a GPU')\ndef test_it(): pass\n"
    command = Command("test", ("-m", "pytest", "-q", f"--junit-xml={report}", str(test)), 60, report)
    monkeypatch.setitem(gpu.PARTS, 1, [command])
    for is_skipped, status, why in ((True, 5, "all 1 tests were skipped: needs a GPU"), (False, 0, "")):
        test.write_text(text.format(is_skipped))
        assert gpu.run_part(1, tmp_path, time.monotonic() + 60, options()) != is_skipped
        assert json.loads((tmp_path / "gpu_parts.json").read_text())["1 test"].items() >= {
            "status": status, "why": why,
        }.items()  # fmt: skip


def test_what_is_missing_is_said_before_anything_runs(tmp_path):
    bare = {"gpu": None, "error": "no driver", "missing": ["orjson", "torchao"], "missing_others": ["xxhash"]}
    first, second, third = gpu.shortcomings(bare, options())
    assert "no GPU here: no driver" in first and "orjson, torchao. Fix: make gpu-wheels" in second
    assert "missing: xxhash" in third
    whole = {"gpu": "NVIDIA H100 80GB HBM3", "missing": [], "missing_others": []}
    assert not list(gpu.shortcomings(whole, options()))
    (small,) = gpu.shortcomings(whole | {"free_bytes": 84e9}, options(part=2))
    assert "part 2 takes 120 GB of a GPU; 84 GB are free" in small
    assert not list(gpu.shortcomings(whole | {"free_bytes": 148e9}, options(part=2)))
    (no_text,) = gpu.shortcomings(whole, options(part=3, tokens=str(tmp_path)))
    assert "tokens and tokenizer missing" in no_text


@pytest.mark.parametrize("is_fetched_before", [False, True])
def test_a_fetch_of_wheels_deletes_only_what_a_fetch_brought(monkeypatch, tmp_path, is_fetched_before):
    """pip brings nothing here."""
    monkeypatch.setattr(gpu.subprocess, "run", lambda command: argparse.Namespace(returncode=1))
    for name in ("own.whl", "unpacked/own.py", "fetched.whl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    if is_fetched_before:
        (tmp_path / "fetched_wheels.txt").write_text("fetched.whl\n")
    assert gpu.fetch_wheels(tmp_path) == 1
    assert (tmp_path / "own.whl").exists()
    for name in ("fetched.whl", "unpacked/own.py"):
        assert (tmp_path / name).exists() != is_fetched_before


def test_the_wheels_are_the_locked_versions_and_the_torchao_of_that_torch():
    lock = (ROOT / "constraints.lock").read_text(encoding="utf-8").splitlines()
    versions = gpu.wheel_versions("2.11")
    assert versions.pop("torchao") == "0.17.0"
    assert {f"{name}=={number}" for name, number in versions.items()} <= set(lock)
