"""Writes docs/launch_lumi_g.sh, the job that docs/clusters.md shows: `python docs/launch_script.py`."""

import contextlib
import io
import tempfile
from pathlib import Path

from kielo.cli.main import main

PAGE = Path(__file__).resolve().parent / "launch_lumi_g.sh"
FLAGS = ["--cluster", "lumi_g", "--nodes", "64", "--account", "project_462000000", "--dry-run"]
SHOWN_FOLDER = "/scratch/project_462000000/kielo"


def page() -> str:
    """Returns job.sh of `kielo launch poro_34b`, as if it were launched in `SHOWN_FOLDER`."""
    # A path without characters that bash wants in quotes, whatever TMPDIR is.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, contextlib.chdir(folder):
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["launch", "poro_34b", *FLAGS]) == 0
        text = Path("runs/poro_34b/launch/0001/job.sh").read_text(encoding="utf-8")
        return text.replace(str(Path.cwd()), SHOWN_FOLDER)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
