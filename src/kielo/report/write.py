"""The report stage: a run folder -> report.html, summary.json, and the model card in hf/.

`page.html.jinja` lays the page out within `frame.html.jinja`. The page fetches nothing (a content security
policy forbids it), has no script, and escapes every text. The figures of a section are entries of
`figures.FIGURES`. A stage that has not run gets a sentence instead.
"""

import time
from dataclasses import replace
from pathlib import Path

from kielo.artifact.durable import (
    disk_problems_reported,
    refuse_other_json,
    refuse_other_text,
    write_own_text,
)
from kielo.artifact.scores import StageTime, Summary
from kielo.artifact.stage_json import write_json
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.report import model_card
from kielo.report.figures import FIGURES
from kielo.report.gather import Gathered, gather, summarise
from kielo.report.units import fill_template


def write_report(run_folder: Path, recipe: Recipe, stages: dict[str, StageTime] | None = None) -> Path:
    """Write the three files, each whole or not at all, and return the page's path.

    `stages`: times of this run's stages. The report's own seconds are measured here. Raise KieloError for a
    stage's damaged file, and, before anything is written, for a person's file under one of these names. A
    person's model card stays.
    """
    started = time.monotonic()
    run_folder = Path(run_folder)
    path = run_folder / "report.html"
    refuse_other_text(path)
    refuse_other_json(run_folder / Summary.FILE_NAME, "kielo_version")
    earlier = {name: stage for name, stage in (stages or {}).items() if name != "report"}
    try:
        gathered = gather(run_folder, recipe, earlier)
        html = render_page(gathered)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise KieloError(
            f"{run_folder}: a stage's file is not as Kielo writes it ({type(error).__name__}: {error}), so "
            f"no report is possible. Fix: run that stage again with --again"
        ) from error
    with disk_problems_reported(f"{run_folder}: the report"):
        if gathered.export:
            model_card.write_model_card(Path(gathered.export), model_card.render(gathered))
        write_own_text(path, html)
        own = StageTime(seconds=round(time.monotonic() - started, 3), skipped=False)
        write_json(run_folder, summarise(replace(gathered, stages=earlier | {"report": own})))
    return path


def render_page(gathered: Gathered) -> str:
    def figures(section: str) -> list[tuple[str, str]]:
        found = (entry.drawn(gathered) for entry in FIGURES if entry.section == section)
        return [drawn for drawn in found if drawn is not None]

    return fill_template("page.html.jinja", **vars(gathered), figures=figures)
