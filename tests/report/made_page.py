"""A page of a run that has done nothing, to which a test adds results, and its sections as text."""

import re

from kielo.report import write
from kielo.report.gather import Gathered
from tests.report.synthetic_run import RECIPE
from tests.report.test_whole_page import Text

ENCODER = RECIPE.model_copy(update={"train": RECIPE.train.model_copy(update={"objective": "masked_tokens"})})
NOTHING = Gathered(
    recipe=RECIPE, run_folder="run", kielo_version="9.8", stages={}, stage_rows=[], corpus=None, funnel=None,
    tokenizer=None, row_map=None, tokens=None, packing=[], overview=None, training=None, chronicle=[],
    parity=None, scores=None, masked_scores=None, export=None, versions={},
)  # fmt: skip


def section(name: str, found: Gathered) -> str:
    """Returns the HTML below a section's title."""
    return re.search(
        rf'<section id="{name}"><h2>[^<]*</h2>\n(.*?)\n</section>', write.render_page(found), re.S
    )[1]


def words(name: str, found: Gathered) -> list[str]:
    return Text(section(name, found)).lines


def sections(found: Gathered) -> list[str]:
    return re.findall(r'<section id="([^"]*)">', write.render_page(found))
