"""A ladder's table and notes, from six rungs whose numbers are counted by hand."""

from typing import Any

import pytest

from kielo.artifact.launch_files import Ladder, MeasuredSpeed, PlannedSpeed, ReferenceSpeed, Rung
from kielo.report.ladder_page import is_in_interval, linear_speed, markdown, notes, table


def rung(nodes: int, layout: str, speed: float | None, tflops: float = 0.0, *planned: float) -> Rung:
    """planned: the plan's tokens a second, and the ends of its interval."""
    plan = dict(zip(("tokens_per_second", "low_tokens_per_second", "high_tokens_per_second"), planned))
    measured = {"steps": 8, "step_seconds": 1.0, "tokens_per_second": speed, "tflops_per_device": tflops}
    return Rung(
        nodes=nodes, devices=8 * nodes, layout=layout, folder="",
        planned=PlannedSpeed(**plan, tflops_per_device=1.0) if plan else None,
        measured=None if speed is None else MeasuredSpeed(**measured),
        state="measured" if speed else "it | broke",
    )  # fmt: skip


RUNGS = [
    rung(2, "tp2", 1000.0, 100.4, 1100.0, 900.0, 1200.0),
    rung(2, "tp4", 800.0, 80.2, 700.0, 600.0, 750.0),
    rung(4, "dp", 1500.0, 75.0, 1500.0, 1500.0, 1500.0),
    rung(4, "tp2", 1800.0, 90.0),
    rung(8, "tp4", None, 0.0, 4400.4, 4000.0, 5000.0),
    rung(16, "tp8", None),
]
REFERENCE = ReferenceSpeed(
    nodes=6, tflops_per_device=50.0, tolerance=0.1, software="Others' code, 7B", source="a page, 2025-01"
)


def ladder(rungs: list[Rung] = RUNGS, **changes: Any) -> Ladder:
    usual = {
        "name": "a<b", "cluster": "site", "machine": "", "parameters": 7_300_000_000,
        "tokens_per_step": 4_194_304, "sequence_length": 8192, "rungs": rungs, "references": [REFERENCE],
        "kielo_version": "9.8", "written_at": "2025-01-02 03:04",
    }  # fmt: skip
    return Ladder(**(usual | changes))


def test_rows_of_the_table() -> None:
    """The plan's interval has its ends in it; % of linear is by the fastest on the fewest nodes."""
    titles, rows = table(ladder())
    assert titles == (
        "nodes", "layout", "tokens/s", "TFLOP/s a device", "% of linear", "planned", "difference",
    )  # fmt: skip
    assert rows == [
        ("2", "tp2", "1,000", "100", "100%", "1,100", "-9%"),
        ("2", "tp4", "800", "80.2", "80%", "700", "+14% (outside of the interval)"),
        ("4", "dp", "1,500", "75", "75%", "1,500", "+0%"),
        ("4", "tp2", "1,800", "90", "90%", "–", "–"),
        ("8", "tp4", "it | broke", "–", "–", "4,400", "–"),
        ("16", "tp8", "it | broke", "–", "–", "–", "–"),
    ]


@pytest.mark.parametrize(("speed", "is_inside"), [(89, False), (90, True), (120, True), (121, False)])
def test_the_interval_of_the_plan(speed: float, is_inside: bool) -> None:
    one = rung(2, "x", speed, 1.0, 100.0, 90.0, 120.0)
    assert is_in_interval(one.measured, one.planned) is is_inside


def test_linear_is_by_the_fastest_on_the_fewest_nodes() -> None:
    many, slow, fast = rung(4, "a", 90), rung(3, "b", 20), rung(3, "c", 30)
    assert linear_speed([many, slow, fast]) == 10 and linear_speed([many, rung(1, "e", None)]) == 22.5
    assert linear_speed(RUNGS[4:]) == 0


def test_notes_say_how_it_was_measured_and_planned() -> None:
    how, linear, planned, others, use = notes(ladder())
    assert how == (
        "a<b: 7.30 billion parameters, steps of 4,194,304 tokens on any number of nodes, sequences of 8,192, "
        "on site. Each figure is the median of a rung's steps without the first two."
    )
    assert linear.startswith(
        "% of linear: tokens/s of a node, as a share of the fastest layout's on the fewest"
    )
    assert planned == "Planned by constants fitted on published runs, before the measurement."
    assert others == "Others on 6 nodes: 50 TFLOP/s a device ± 10%, Others' code, 7B (a page, 2025-01)."
    assert use.startswith("To plan with what was measured: kielo plan calibrate")
    assert notes(ladder(machine="mine.toml"))[2] == "Planned by the card mine.toml, before the measurement."
    assert len(notes(ladder(references=[]))) == 4
    unmeasured = notes(ladder(RUNGS[4:]))
    assert len(unmeasured) == 4 and unmeasured[3] == others
    assert len(notes(ladder(RUNGS[5:], references=[]))) == 2  # nor planned


def test_the_table_as_markdown() -> None:
    """A bar within a cell would end it."""
    text = markdown(ladder([RUNGS[1], RUNGS[4]], references=[]))
    lines = text.split("\n")
    assert lines[:6] == [
        "# a<b on site: measured and planned", "",
        "| nodes | layout | tokens/s | TFLOP/s a device | % of linear | planned | difference |",
        "|--:|---|--:|--:|--:|--:|--:|",
        "| 2 | tp4 | 800 | 80.2 | 100% | 700 | +14% (outside of the interval) |",
        "| 8 | tp4 | it / broke | – | – | 4,400 | – |",
    ]  # fmt: skip
    assert lines[6::2] == ["", "", "", "", ""] and lines[7:14:2] == notes(ladder(RUNGS[:5], references=[]))
