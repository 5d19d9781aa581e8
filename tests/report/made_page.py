"""A page of a run that has done nothing, to which a test adds results, and its sections as text."""

import re
from typing import Any

from kielo.report import page
from tests.report.synthetic_run import RECIPE
from tests.report.test_whole_page import Text

ENCODER = RECIPE.model_copy(update={"train": RECIPE.train.model_copy(update={"objective": "masked_tokens"})})
NOTHING = {
    "scores": None, "parity": None, "masked_scores": None, "overview": None, "training": None, "corpus": None,
    "funnel": None, "tokenizer": None, "tokens": None, "packing": [], "export": None, "row_map": None,
    "chronicle": [], "stage_rows": [], "versions": {}, "kielo_version": "9.8",
    "recipe": RECIPE,
}  # fmt: skip


def section(name: str, found: dict[str, Any]) -> str:
    """Returns the HTML below a section's title."""
    return re.search(rf'<section id="{name}"><h2>[^<]*</h2>\n(.*?)\n</section>', page.render(found), re.S)[1]


def words(name: str, found: dict[str, Any]) -> list[str]:
    return Text(section(name, found)).lines


def sections(found: dict[str, Any]) -> list[str]:
    return re.findall(r'<section id="([^"]*)">', page.render(found))
