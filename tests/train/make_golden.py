"""Writes the golden files of the format's version: `python -m tests.train.make_golden`.

`tests/resolve/golden/version_N` holds what version N of the format (`artifact/run_format.py`) wrote for the
two recipes beside it: the `resolved.toml` of each, and of "tiny" a checkpoint of step 4 of 10 and the
manifests of the finished run. The files of a version never change once it is released.
"""

import os
import shutil
import tempfile
from pathlib import Path

from kielo.artifact.run_format import FORMAT_VERSION
from kielo.resolve.resolved import write
from kielo.train.run import train
from tests.resolve.golden_runs import GOLDEN, RECIPES, RUN_FOLDER, golden_resolved
from tests.started_ranks import run_ranks

_STOP_AT = 4


def make() -> None:
    """Write `golden/version_N` of the version that this code writes. It must not be there."""
    target = GOLDEN / f"version_{FORMAT_VERSION}"
    target.mkdir()
    for name in RECIPES:
        write(golden_resolved(name), target / f"{name}.toml")
    with tempfile.TemporaryDirectory() as made:
        run = Path(made) / RUN_FOLDER
        checkpoints = run / "train" / "checkpoints"
        shutil.copytree(GOLDEN / "tokens", run / "tokens")
        run_ranks(_train, 1, Path(made), _STOP_AT)
        shutil.copytree(checkpoints / f"step_{_STOP_AT:08d}", target / "checkpoint")
        run_ranks(_train, 1, Path(made), None)
        # the manifest of the run lists only the manifest of its last checkpoint
        last = next(checkpoints.glob("step_*10/manifest.json"))
        (target / "finished_train" / last.parent.relative_to(run / "train")).mkdir(parents=True)
        for path in (last, run / "train" / "manifest.json"):
            shutil.copy(path, target / "finished_train" / path.relative_to(run / "train"))


def _train(folder: Path, max_steps: int | None) -> None:
    os.chdir(folder)
    train(golden_resolved("tiny"), max_steps)


if __name__ == "__main__":
    make()
