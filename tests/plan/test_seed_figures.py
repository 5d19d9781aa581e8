"""The table of published projects' device-hours: the committed page follows from the committed constants."""

import json

import pytest
import seed_figures
from published_runs import read_published_runs


@pytest.fixture(scope="module")
def written():
    return json.loads(seed_figures.RESULT.read_text())


def test_the_page_is_that_of_the_constants(written):
    """Each project but for the search of Kielo's best layouts, which are kept with their steps' columns."""
    runs = {run.name.split("#")[0]: run for run in read_published_runs(seed_figures.TABLE)}
    now = [seed_figures.figures(seed, runs, written["best"]) for seed in seed_figures.SEEDS]
    for mine, other in zip(now, written["seeds"], strict=True):
        for name in ("said", "planned", "best", "open", "parts", "lost"):
            assert mine[name] == pytest.approx(other[name]), (other["title"], name)
    page = seed_figures.PAGE.read_text()
    assert all(table in page for table in seed_figures.tables(written["seeds"]).values())


def test_the_parts_are_the_difference(written):
    for row in written["seeds"]:
        lost = 0 if row["is_speed"] else sum(row["lost"].values())
        parts = row["open"] + lost + sum(row["parts"].values())
        assert parts == pytest.approx(row["said"] - row["best"]), row["title"]


def test_hours_are_those_that_projects_say(written):
    """By hand: 75 runs of 768; 172 billion weights at 400 TFLOP/s, 6 FLOPs each and 12 of a score."""
    said = {row["title"]: row["said"] for row in written["seeds"]}
    assert said["75 BERTs (001)"] == 75 * 6 * 128
    weights = 96 * (2 * 12288 * (12288 + 2048) + 3 * 12288 * 38464) + 99_584 * 12288
    flops = 2_072_490_541_056 * (6 * weights + 12 * 96 * 12288 * 4096)
    title = "LLM-jp 172B, 2.07T tokens, 512 H100, BF16 (003)"
    assert said[title] == pytest.approx(flops / 400e12 / 3600)
