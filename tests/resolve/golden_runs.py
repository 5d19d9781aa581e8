"""The runs of the golden files in `golden/`, which `tests/train/make_golden.py` writes."""

from pathlib import Path

from kielo.artifact.manifest import hash_manifest, read_manifest
from kielo.recipe.read import read_toml
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Resolved
from kielo.resolve.text import Text

GOLDEN = Path(__file__).parent / "golden"
RECIPES = ("tiny", "phases")
RUN_FOLDER = Path("runs/golden")  # relative, so that no machine's paths are in the files


def golden_recipe(name: str) -> Recipe:
    return Recipe.model_validate(read_toml(GOLDEN / "recipes" / f"{name}.toml"))


def golden_resolved(
    name: str, run_folder: Path = RUN_FOLDER, recipe: Recipe | None = None, ranks: int = 1
) -> Resolved:
    """The run of one of `RECIPES`, or of another recipe on its machine and text."""
    recipe = recipe or golden_recipe(name)
    if name == "phases":
        text = Text({"books": 200_000, "news": 90_000}, 9_000, "0123456789abcdef", 1_000, 3, "fedcba98")
        return resolve(recipe, run_folder, 16, "cuda", "h100_80", text)
    counts = read_manifest(GOLDEN / "tokens").counts
    tokens = {source: numbers["tokens"] for source, numbers in counts["sources"].items()}
    text = Text(tokens, counts["heldout"]["tokens"], hash_manifest(GOLDEN / "tokens"), 67, 0)
    return resolve(recipe, run_folder, ranks, "cpu", text=text)
