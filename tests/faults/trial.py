"""The promises of every case of the fault suite, checked in one place.

A case plants a fault, an odd input or a careless use, runs a verb as a person would, and asserts with these
functions: the verb was `refused` in one message that names the culprit, or it `went_well` with the right
result; there is never a traceback; and what a person had is still there, byte for byte (`belongings`).
"""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_run import RECIPE as TINY
from tests.corpus.texts import ENGLISH, estonian_document

RECIPE = TINY.format(folder="run", text="text.txt") + "\n[checkpoint]\nevery_steps = 5\n"
MAX_MESSAGE_LINES = 12


@dataclass(frozen=True)
class Outcome:
    """A verb's exit code and both of its streams as text."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> str:
        return self.out + self.err


def rest_marked_full(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Parameters of a sweep whose cases are alike: `make test-faults` runs those in `kept`, `make test-full`
    runs all.
    """
    cases = list(cases)
    assert all(case in cases for case in kept), "a kept case is in the sweep"
    return [case if case in kept else pytest.param(case, marks=pytest.mark.full) for case in cases]


def write_workplace(folder: Path, documents: int = 40) -> Path:
    """A folder with `tiny.toml` and `text.txt`, whose run goes to `run` in it; paths are relative, so copies
    of it work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [estonian_document(number).replace("\n", " ") for number in range(documents)] + ENGLISH
    (folder / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "tiny.toml").write_text(RECIPE, encoding="utf-8")
    return folder


def start(workplace: Path, *arguments: str | Path, **environment: str) -> subprocess.Popen:
    """`kielo` as a person starts it, in a process of its own, in `workplace`."""
    return subprocess.Popen(
        [sys.executable, "-m", "kielo", *map(str, arguments)],
        cwd=workplace,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def kielo(workplace: Path, *arguments: str | Path, timeout: float = 120, **environment: str) -> Outcome:
    """The same, waited for. One that takes longer than `timeout` seconds is killed,
    and the case has failed.
    """
    process = start(workplace, *arguments, **environment)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(
            f"kielo {' '.join(map(str, arguments))} hung for {timeout:g} s:\n{out}\n{err}"
        ) from None
    return Outcome(process.returncode, out, err)


def went_well(outcome: Outcome, code: int = 0) -> Outcome:
    """The verb ended with `code` (0: done, 75: stopped on purpose) and without a traceback."""
    assert "Traceback (most recent call last)" not in outcome.told, outcome.told
    assert outcome.code == code, outcome.told
    return outcome


def refused(outcome: Outcome, reason: str, *named: str) -> str:
    """The verb ended with 1 or 2 and one message, which says `reason`, a phrase of it, names all of `named`
    and is no traceback; returns the message.
    """
    assert " " in reason, f"{reason!r} may be the name of something, and is no reason"
    assert "Traceback (most recent call last)" not in outcome.told, outcome.told
    assert outcome.code in (1, 2), f"exit code {outcome.code}\n{outcome.told}"
    of_ours = re.compile(r"^kielo: " if outcome.code == 1 else r"^kielo[a-z ]*: ", re.MULTILINE)
    begins = [found.end() for found in of_ours.finditer(outcome.err)]
    assert begins, f"no message of ours on stderr:\n{outcome.told}"
    message = outcome.err[begins[-1] :]
    assert message.count("\n") <= MAX_MESSAGE_LINES, message
    assert reason in message, f"{reason!r} is not the reason in: {message}"
    for word in named:
        assert word in message, f"{word!r} is not named in: {message}"
    return message


def belongings(folder: Path) -> dict[str, str]:
    """Every file and link below `folder`, relative to it, with a hash of its bytes (of a link:
    where it leads).
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
