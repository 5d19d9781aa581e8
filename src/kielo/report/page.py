"""The report page: what `gather` found -> one self-contained report.html.

`page.html.jinja` lays it out within `frame.html.jinja`. The page
fetches nothing (a content security policy forbids it), has no script, and escapes every text. A section's
figures are entries of `figures.FIGURES`. A stage that has not run gets a sentence instead.
"""

from kielo.report.figures import FIGURES
from kielo.report.gather import Gathered
from kielo.report.units import (
    fill_template,
)


def render(gathered: Gathered) -> str:
    def figures(section: str) -> list[tuple[str, str]]:
        found = (entry.drawn(gathered) for entry in FIGURES if entry.section == section)
        return [drawn for drawn in found if drawn is not None]

    return fill_template("page.html.jinja", **vars(gathered), figures=figures)
