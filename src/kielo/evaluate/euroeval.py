"""EuroEval, a benchmark of European languages, on an exported model: its command line."""

import shutil
import subprocess
from pathlib import Path

from kielo.recipe.errors import KieloError

PROGRAM = "euroeval"


def euroeval_command(export: Path, language: str) -> list[str]:
    """Return EuroEval's command line for an export. Raise KieloError if there is none."""
    if not (export / "config.json").is_file():
        raise KieloError(f"{export}: no exported model. Fix: kielo export {export.parent} --to {export}")
    return [PROGRAM, "--model", str(export), "--language", language]


def run_euroeval(command: list[str]) -> int | None:
    """Run EuroEval and return its exit code; None if it is not installed."""
    return subprocess.run(command, check=False).returncode if shutil.which(PROGRAM) else None
