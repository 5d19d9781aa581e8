"""The report stage: a run folder -> report.html, summary.json, and the model card in hf/."""

import time
from pathlib import Path
from typing import Any

from kielo.artifact.manifest import write_json_atomically, write_text_atomically
from kielo.recipe.sections import Recipe
from kielo.report import model_card, page
from kielo.report.gather import gather, summarise


def write_report(run_folder: Path, recipe: Recipe, stages: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Write the three files, each whole or not at all, and return the summary.

    `stages` is name -> {"seconds", "skipped"} of this run; the report adds itself when it is not among them.
    Stages that have not run are shown as such; a damaged file of theirs is a KieloError that names it.
    """
    started = time.monotonic()
    run_folder = Path(run_folder)
    gathered = gather(run_folder, recipe, dict(stages or {}))
    model_card.write_model_card(gathered)
    write_text_atomically(run_folder / "report.html", page.render(gathered))
    summary = summarise(gathered)
    summary["stages"].setdefault("report", {"seconds": round(time.monotonic() - started, 3), "skipped": False})
    write_json_atomically(run_folder / "summary.json", summary)
    return summary
