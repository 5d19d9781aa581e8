"""A run's description in its folder: the recipe, and the format version with its migrations."""

import glob
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kielo.artifact.durable import HASH_COMMENT, is_own_text, write_own_text
from kielo.artifact.json_object import JsonTable, texts_in
from kielo.recipe.errors import KieloError
from kielo.recipe.places import without_form
from kielo.recipe.read import RUN_RECIPE_NAME
from kielo.recipe.sections import Recipe
from kielo.recipe.toml_text import toml_table

# `resolved.toml` describes a run by its identity and its placement. Each checkpoint's `index.json` and the
# manifests of the stages `train` and `verify` also store the identity. Each of these has the `format_version`
# in which it was written. Readers migrate it, so that a run continues after an upgrade of Kielo. Versions 0
# and 1 were never released.
#
# A new key with a default needs no new version. To rename, move or remove a key, or to change its meaning,
# add an entry to `_MIGRATIONS`, and golden files (`python -m tests.train.make_golden`). Migrations work on
# plain tables, so that no later change of a section breaks them, and accept tables that lack keys.

VERSION_KEY = "format_version"
OLDEST_VERSION = 2
Table = JsonTable


class Migration(NamedTuple):
    identity: Callable[[Table], Table]
    placement: Callable[[Table], Table]


def _identity_from_2(identity: Table) -> Table:
    """Remove the order of samples that version 3 always has. Another order stays and is refused."""
    phases = [
        {key: value for key, value in phase.items() if (key, value) != ("mixture_order", "every_sample")}
        for phase in identity.get("phases", [])
    ]
    return identity | {"phases": phases}


def _placement_from_2(placement: Table) -> Table:
    train = placement.get("train", {}).copy()
    train.pop("max_left_out_sequences", None)
    return placement | {"train": train}


_MIGRATIONS = (Migration(_identity_from_2, _placement_from_2),)  # entry n: from OLDEST_VERSION + n
FORMAT_VERSION = OLDEST_VERSION + len(_MIGRATIONS)


def with_version(content: Mapping[str, Any]) -> Table:
    return {VERSION_KEY: FORMAT_VERSION, **content}


def migrated_identity(stored: Mapping[str, Any], where: Path | str) -> Table:
    """Return a stored identity in this version's form, with the version. KieloError for another version."""
    identity, version = _without_version(stored, where)
    for migration in _MIGRATIONS[version - OLDEST_VERSION :]:
        identity = migration.identity(identity)
    return with_version(identity)


def migrated_run(stored: Mapping[str, Any], where: Path | str) -> Table:
    """Return {"identity", "placement"} of this version. stored: a `resolved.toml`. Errors as above."""
    run, version = _without_version(stored, where)
    try:
        for migration in _MIGRATIONS[version - OLDEST_VERSION :]:
            functions = migration._asdict()
            run = {part: migrate(run[part]) for part, migrate in functions.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise KieloError(
            f"{where}: says format version {version}, but its content does not fit ({error!r}). "
            "Fix: delete it and resolve again"
        ) from None
    return run


def _without_version(stored: Mapping[str, Any], where: Path | str) -> tuple[Table, int]:
    if not isinstance(stored, Mapping):
        raise KieloError(f"{where}: describes no run, but contains {stored!r}")
    content = dict(stored)
    version = content.pop(VERSION_KEY, 0)
    if not isinstance(version, int) or version < 0:
        raise KieloError(f"{where}: {VERSION_KEY} = {version!r} is no version of the format")
    if not OLDEST_VERSION <= version <= FORMAT_VERSION:
        other = "a later one" if version > FORMAT_VERSION else "another run folder to begin again"
        raise KieloError(
            f"{where}: is of format version {version}, and this Kielo reads versions {OLDEST_VERSION} to "
            f"{FORMAT_VERSION}. Fix: the Kielo that wrote it, or {other}"
        )
    return content, version


_HEADER = (
    "# The recipe of this run with the flags of its last `kielo run`: verbs take this folder in its place.\n"
    "# A copy that you change is yours: Kielo reads it and does not write it again.\n"
)


_START = "# Its relative paths start in "  # then the folder, and the way to it from the run folder, as JSON


def write_run_recipe(recipe: Recipe, run_folder: Path) -> bool:
    """Write every value of `recipe` that is no default. Return False if a person's own file stays."""
    path = run_folder / RUN_RECIPE_NAME
    if os.path.lexists(path) and not is_own_text(path):
        return False
    start = os.path.realpath(os.curdir)
    places = json.dumps([start, os.path.relpath(start, os.path.realpath(run_folder))])
    values = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"folder"})
    write_own_text(path, f"{_HEADER}{_START}{places}\n{toml_table('', values)}", HASH_COMMENT)
    return True


def refuse_other_start(recipe: Recipe, run_folder: Path) -> None:
    """Refuse a run by its folder if its recipe's relative paths would lead to other files here.

    A run that was moved alone starts in its old folder, a run that was moved with its project in the new.
    """
    text = (run_folder / RUN_RECIPE_NAME).read_text(encoding="utf-8", errors="replace")
    found = re.search(rf"^{_START}(\[.*\])$", text, re.MULTILINE)
    if found is None:  # an earlier version wrote it
        return
    here, of_run = os.path.realpath(os.curdir), os.path.realpath(run_folder)
    start, way = json.loads(found[1])
    if here in (start, os.path.realpath(os.path.join(of_run, way))):
        return
    for value in texts_in(recipe.model_dump(mode="json", exclude_defaults=True, exclude={"folder"})):
        path = without_form(value)
        if path and path[0] not in "/~" and glob.glob(os.path.join(glob.escape(start), path)):
            run = shlex.quote(os.path.relpath(of_run, start))
            raise KieloError(
                f"{run_folder}: the run was started in {start}, and its path {value} begins there, not in "
                f"{here}. Fix: cd {shlex.quote(start)} && kielo run {run}"
            )
