"""`recipe.toml` of a run folder: the recipe with the flags of the last `kielo run`."""

import os
from pathlib import Path

from kielo.artifact.own_text import HASH_COMMENT, is_own_text, write_own_text
from kielo.recipe.read import RUN_RECIPE_NAME
from kielo.recipe.sections import Recipe
from kielo.recipe.toml_text import toml_table

_HEADER = (
    "# The recipe of this run with the flags of its last `kielo run`: verbs take this folder in its place.\n"
    "# A copy that you change is yours: Kielo reads it and does not write it again.\n"
)


def write_run_recipe(recipe: Recipe, run_folder: Path) -> bool:
    """Writes every value of `recipe` that is no default.

    Returns False where a person's own file stays.
    """
    path = run_folder / RUN_RECIPE_NAME
    if os.path.lexists(path) and not is_own_text(path):
        return False
    values = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"folder"})
    write_own_text(path, _HEADER + toml_table("", values), HASH_COMMENT)
    return True
