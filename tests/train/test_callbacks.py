"""Callbacks of other packages: what they are told of a run, and what becomes of those that fail."""

import json
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.artifact.attempt_files import append_alert
from kielo.cli.main import main
from kielo.train.callbacks import Callback, callbacks_of_packages
from tests.cli.test_run import write_recipe
from tests.train.test_log import row


def install(folder: Path, name: str, code: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package as pip leaves it: a module, and the metadata with its entry point."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[kielo.callbacks]\n{name} = {name}:{target}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_the_example_of_the_page_sees_a_training(tmp_path, monkeypatch, capsys) -> None:
    """Its file has the loss of each logged step and the checkpoints; a package that fails is an alert."""
    page = Path("docs/training.md").read_text(encoding="utf-8")
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.S) if "class Notes" in one]
    recipe = write_recipe(tmp_path)
    install(tmp_path / "site", "notes_of_test", code, "Notes", monkeypatch)
    install(tmp_path / "site", "broken_of_test", "import nothing_like_it", "Notes", monkeypatch)
    monkeypatch.chdir(tmp_path)
    sets = ["--set", "checkpoint.every_steps=10", "--set", "train.log_every_steps=5"]
    assert main(["run", str(recipe), "--to", "train", *sets]) == 0
    lines = Path("notes.txt").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in Path("run/train/metrics.jsonl").read_text().splitlines()]
    losses = [f"{one['step']} {one['loss']}" for one in rows if "loss" in one]
    assert [line for line in lines if line[0].isdigit()] == losses and len(losses) == 5
    assert [line for line in lines if line.startswith("saved")] == [
        "saved 10 step_00000010", "saved 20 step_00000020",
    ]  # fmt: skip
    alerts = Path("run/train/alerts.jsonl").read_text(encoding="utf-8")
    assert "callback broken_of_test" in alerts and "cannot be made: ModuleNotFoundError" in alerts


def test_nothing_is_made_without_a_package(tmp_path) -> None:
    assert callbacks_of_packages(tmp_path, pytest.fail) == []


def started(target: Any, tmp_path: Path, most_seconds: float = 60) -> tuple[Callback, list[tuple[int, str]]]:
    told: list[tuple[int, str]] = []
    callback = Callback("mine", target, tmp_path, lambda step, text: told.append((step, text)), most_seconds)
    callback.start(0)
    return callback, told


def test_alerts_of_this_attempt_are_passed_on(tmp_path) -> None:
    """Of any rank, whichever wrote the file; those of an earlier attempt are not."""
    seen: list[str] = []
    append_alert(tmp_path / "alerts.jsonl", 1, "old")
    callback, told = started(SimpleNamespace(on_alert=seen.append), tmp_path)
    append_alert(tmp_path / "alerts.jsonl", 2, "slow rank")
    callback.write(row(3))
    callback.close()
    assert (seen, told) == (["slow rank"], [])


def test_the_first_error_switches_a_callback_off(tmp_path) -> None:
    seen: list[int] = []

    def fail(one: Any) -> None:
        seen.append(one.step)
        raise ValueError("no such channel")

    callback, told = started(SimpleNamespace(on_row=fail), tmp_path)
    for step in (1, 2, 3):
        callback.write(row(step))
    callback.close()
    callback.start(3)
    callback.write(row(4))
    callback.close()
    assert seen == [1]
    ((_, said),) = told
    assert said == "callback mine is switched off: on_row: ValueError: no such channel"


def test_a_call_that_never_ends_is_given_up(tmp_path) -> None:
    """Rows go on, and so does the end of the run."""
    ends = threading.Event()
    callback, told = started(SimpleNamespace(on_row=lambda _: ends.wait(60)), tmp_path, most_seconds=0.2)
    callback.write(row(1))
    callback.close()
    ends.set()
    assert told == [(1, "callback mine is switched off: on_row runs for more than 0.2 s")]
