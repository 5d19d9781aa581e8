"""The report stage: a run folder -> report.html, summary.json, and the model card in hf/."""

import time
from pathlib import Path
from typing import Any

from kielo.artifact.durable import disk_problems_told
from kielo.artifact.manifest import write_json_atomically
from kielo.artifact.own_text import refuse_other_json, refuse_other_text, write_own_text
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.report import model_card, page
from kielo.report.gather import gather, summarise


def write_report(run_folder: Path, recipe: Recipe, stages: dict[str, dict[str, Any]] | None = None) -> Path:
    """Writes the three files, each whole or not at all, and returns the page's path.

    `stages` is name -> {"seconds", "skipped"} of this run; the report's own seconds are measured here. Stages
    that have not run are shown as such; a damaged file of theirs is a KieloError that names it. So is, before
    anything is written, a file under one of those names that is a person's; a person's model card stays.
    """
    started = time.monotonic()
    run_folder = Path(run_folder)
    path, summary_path = run_folder / "report.html", run_folder / "summary.json"
    refuse_other_text(path)
    refuse_other_json(summary_path, "kielo_version")
    earlier = {name: stage for name, stage in (stages or {}).items() if name != "report"}
    try:
        gathered = gather(run_folder, recipe, earlier)
        html = page.render(gathered)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise KieloError(
            f"{run_folder}: a file of a stage there is not as Kielo writes it ({type(error).__name__}: "
            f"{error}), so no report can be made of it; run that stage again"
        ) from error
    with disk_problems_told(f"{run_folder}: the report"):
        model_card.write_model_card(gathered)
        write_own_text(path, html)
        own = {"seconds": round(time.monotonic() - started, 3), "skipped": False}
        summary = summarise(gathered | {"stages": earlier | {"report": own}})
        write_json_atomically(summary_path, summary)
    return path
