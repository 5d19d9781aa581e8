"""One finished run, made once for all tests of the verbs that look at a run."""

import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.test_run import write_recipe


class FirstRun(NamedTuple):
    """A run of all stages. summary: what `kielo run --json` printed. screen: all that a terminal got."""

    recipe: Path
    summary: dict
    screen: str


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> FirstRun:
    """`kielo run --json`, which prints for people on standard error: here a terminal of 80 columns."""
    recipe = write_recipe(tmp_path_factory.mktemp("a folder with a space"))
    text = recipe.read_text(encoding="utf-8").replace("[train]", "[train]\nlog_every_steps = 1")
    recipe.write_text(text + "\n[checkpoint]\nevery_steps = 10\n", encoding="utf-8")
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "kielo", "run", str(recipe), "--json"],
        env=environment | {"OMP_NUM_THREADS": "1", "COLUMNS": "80", "TERM": "xterm"},
        stdout=subprocess.PIPE, stderr=theirs, text=True,
    )  # fmt: skip
    os.close(theirs)
    pieces: list[bytes] = []
    reader = threading.Thread(target=_read, args=(ours, pieces), daemon=True)
    reader.start()
    try:
        stdout, _ = process.communicate(timeout=300)
    finally:
        process.kill()  # does nothing to one that ended
        reader.join(timeout=30)
    screen = b"".join(pieces).decode()
    assert process.returncode == 0, screen
    os.close(ours)
    return FirstRun(recipe, json.loads(stdout), screen)


def _read(terminal: int, pieces: list[bytes]) -> None:
    """Reads until the last process that writes to the terminal has ended, which Linux tells by an error."""
    try:
        while piece := os.read(terminal, 65536):
            pieces.append(piece)
    except OSError:
        pass


@pytest.fixture(scope="session")
def finished(first_run: FirstRun) -> tuple[Path, dict]:
    """The recipe of a run that went through all stages, and the JSON that `kielo run --json` printed."""
    return first_run.recipe, first_run.summary
