"""Makes the golden files of the format that this code writes: `python -m tests.resolve.golden_runs`.

`golden/version_N` holds what a version of the format wrote for the two recipes of `golden/recipes`: the
`resolved.toml` of each, and of "tiny" a checkpoint of step 4 of 10 and the manifests of the finished run.
Files of a version that was released never change.
"""

import os
import shutil
import tempfile
from pathlib import Path

from kielo.artifact.manifest import hash_manifest, read_manifest
from kielo.recipe.read import read_toml
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import Text, resolve
from kielo.resolve.resolved import Resolved, write
from kielo.train.run import train
from tests.ranks import run_ranks

GOLDEN = Path(__file__).parent / "golden"
RUN_FOLDER = Path("runs/golden")  # relative, so that no machine's paths are in the files
STOP_AT = 4
FORMAT_VERSION = 0
_RANKS = {"tiny": 1, "phases": 16}


def golden_recipe(name: str) -> Recipe:
    return Recipe.model_validate(read_toml(GOLDEN / "recipes" / f"{name}.toml"))


def golden_resolved(name: str, run_folder: Path = RUN_FOLDER) -> Resolved:
    """The run `name` as this code resolves it."""
    if name == "tiny":
        counts = read_manifest(GOLDEN / "tokens").counts
        tokens = {name: source["tokens"] for name, source in counts["sources"].items()}
        text = Text(tokens, counts["heldout"]["tokens"], hash_manifest(GOLDEN / "tokens"), 67, 0)
    else:
        text = Text({"books": 200_000, "news": 90_000}, 9_000, "0123456789abcdef", 1_000, 3, "fedcba98")
    device, accelerator = ("cpu", None) if name == "tiny" else ("cuda", "h100_80")
    return resolve(golden_recipe(name), run_folder, _RANKS[name], device, accelerator, text)


def make() -> None:
    """Write `golden/version_N` of the version that this code writes. It must not be there."""
    target = GOLDEN / f"version_{FORMAT_VERSION}"
    target.mkdir()
    for name in _RANKS:
        write(golden_resolved(name), target / f"{name}.toml")
    with tempfile.TemporaryDirectory() as made:
        run = Path(made) / RUN_FOLDER
        checkpoints = run / "train" / "checkpoints"
        shutil.copytree(GOLDEN / "tokens", run / "tokens")
        run_ranks(_train, 1, Path(made), STOP_AT)
        shutil.copytree(checkpoints / f"step_{STOP_AT:08d}", target / "checkpoint")
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
