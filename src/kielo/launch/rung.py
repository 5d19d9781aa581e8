"""The outcome of a rung of a ladder: its run folder → measured or not, and why not; no torch."""

import tomllib
from contextlib import suppress
from pathlib import Path

from kielo.launch.job_plan import JobPlan
from kielo.launch.launch_folder import recipe_text
from kielo.launch.status import attempts, newest_launch
from kielo.plan.measured_run import has_measured
from kielo.recipe.errors import KieloError
from kielo.recipe.read import run_folder

# Sections of the recipe of which a measured rung must have the present values. Its layout is in its name.
_SECTIONS = ("model", "train", "dataset", "phases", "tokenizer")


def is_measured(plan: JobPlan) -> bool:
    """Returns True for a rung that is measured. Raises KieloError if that was with another recipe."""
    folder = run_folder(plan.recipe)
    if not has_measured(folder):
        return False
    file = newest_launch(folder) / "recipe.toml"
    before, now = tomllib.loads(file.read_text(encoding="utf-8")), tomllib.loads(recipe_text(plan))
    for content in (before, now):
        for table in (content.get("train", {}), *content.get("phases", [])):
            table.pop("micro_batch_sequences", None)  # it is in the layout's name
    changed = [name for name in _SECTIONS if before.get(name) != now.get(name)]
    if changed:
        raise KieloError(
            f"{file}: was measured with another [{changed[0]}] than the recipe has now; move "
            f"{folder.parents[1]} away to measure anew"
        )
    return True


def state(folder: Path) -> str:
    """Returns "measured", "not run yet", or what became of the rung's last attempt."""
    if has_measured(folder):
        return "measured"
    found = []
    with suppress(KieloError):  # no launch yet
        found = attempts(newest_launch(folder) / "chain" / "attempts")
    if not found:
        return "not run yet"
    last = found[-1]
    if not last.outcome:
        return "runs, or was ended from outside"
    return f"{last.outcome}: {last.message}".rstrip(": ")
