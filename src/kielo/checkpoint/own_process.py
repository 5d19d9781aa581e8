"""A question to another program, answered in a process of its own.

So the program brings its own threads and memory, and may end the process without a message. The module that
answers reads the question as JSON on its standard input, and writes the answer as JSON to the file `to`.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kielo.recipe.errors import KieloError

_LIMIT_SECONDS = 3600
_PROBLEM = re.compile("error|assert", re.IGNORECASE)


def ask(module: str, program: str, file: Path, question: dict[str, Any]) -> Any:
    """Return the answer of `python -m module`. Raise KieloError, with the program's name and `file`."""
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "answer.json"
        asked = json.dumps(question | {"file": str(file), "to": str(to)})
        try:
            ended = subprocess.run(
                [sys.executable, "-P", "-m", module], input=asked, capture_output=True, text=True,
                errors="replace", check=False, timeout=_LIMIT_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise KieloError(f"{file}: {program} did not answer within {_LIMIT_SECONDS} s") from None
        if ended.returncode or not to.exists():
            said = [line for line in ended.stderr.splitlines() if _PROBLEM.search(line)] or ["no message"]
            raise KieloError(f"{file}: {program} failed with exit code {ended.returncode}: {said[-1]}")
        return json.loads(to.read_text(encoding="utf-8"))


def answer_with(function: Callable[[dict[str, Any]], Any]) -> None:
    """Answer the question on the standard input with `function`."""
    asked = json.load(sys.stdin)
    Path(asked["to"]).write_text(json.dumps(function(asked)), encoding="utf-8")
