"""The report stage: a run folder -> report.html, summary.json, and the model card in hf/."""

import time
from pathlib import Path
from typing import Any

from kielo.artifact.manifest import write_json_atomically, write_text_atomically
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.report import model_card, page
from kielo.report.gather import gather, summarise


def write_report(run_folder: Path, recipe: Recipe, stages: dict[str, dict[str, Any]] | None = None) -> Path:
    """Write the three files, each whole or not at all; returns the page's path.

    `stages` is name -> {"seconds", "skipped"} of this run; the report's own seconds are measured here.
    Stages that have not run are shown as such; a damaged file of theirs is a KieloError that names it.
    """
    started = time.monotonic()
    run_folder = Path(run_folder)
    earlier = {name: stage for name, stage in (stages or {}).items() if name != "report"}
    path = run_folder / "report.html"
    try:
        gathered = gather(run_folder, recipe, earlier)
        card, text = model_card.render(gathered), page.render(gathered)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise KieloError(
            f"{run_folder}: a file of a stage does not hold what the report reads ({type(error).__name__}: {error}); "
            "was one edited? Delete that stage's folder and run it again"
        ) from error
    if gathered["export"]:
        write_text_atomically(Path(gathered["export"]) / "README.md", card)
    write_text_atomically(path, text)
    own = {"seconds": round(time.monotonic() - started, 3), "skipped": False}
    summary = summarise(gathered | {"stages": earlier | {"report": own}})
    write_json_atomically(run_folder / "summary.json", summary)
    return path
