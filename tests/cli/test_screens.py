"""Verbs on a terminal of 80 columns print no longer line, and cut nothing."""

import re

import pytest

from kielo.cli.main import main

SCREENS = {
    "plan": ["plan", "poro_34b", "--nodes", "64"],
    "plan of several": ["plan", "estonian_llama31_70b", "--nodes", "4..64"],
    "plan compare": ["plan", "compare", "estonian_llama31_70b", "tp8pp4", "tp8pp8", "--nodes", "16"],
    "plan explain": ["plan", "explain", "estonian_llama31_70b", "tp8pp4", "--nodes", "16"],
    "show": ["show", "poro_34b"],
    "recipes": ["recipes"],
    "clusters": ["clusters"],
    "languages": ["languages"],
    "schema": ["schema"],
}


@pytest.mark.parametrize("arguments", SCREENS.values(), ids=SCREENS)
def test_a_screen_has_80_columns(arguments: list[str], capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stdout for a terminal
    monkeypatch.setenv("COLUMNS", "80")
    assert main(arguments) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert lines and not [line for line in lines if len(line) > 80 or "…" in line]


def test_a_plan_says_where_nothing_fits_and_where_the_recipes_own_layout_is_best(capsys) -> None:
    """Several numbers of nodes, of which one is too few; and a recipe that has the best layout already."""
    anew = ["--set", "layout.recompute=full"]
    assert main(["plan", "estonian_llama31_70b", "--nodes", "2,4", *anew]) == 0
    printed = capsys.readouterr().out
    assert "No layout fits on 2 nodes." in printed and "slower than the fastest by" in printed
    own = ["layout.tensor=4", "layout.pipeline=4", "layout.zero=3", "layout.recompute=norms+activations"]
    own += ["train.micro_batch_sequences=1"]
    sets = [word for one in own for word in ("--set", one)]
    assert main(["plan", "estonian_llama31_70b", "--nodes", "4", *sets]) == 0
    printed = capsys.readouterr().out
    assert "The recipe's own layout (*) is the fastest." in printed and "-norms+activations *" in printed


def test_a_plan_answers_in_a_short_table(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, the fastest layouts with days and what the site bills, and the recipe's own beside them."""
    assert main(["plan", "poro_34b", "--nodes", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "model\tbloom, 34.2 billion parameters" in lines
    titles = next(line for line in lines if line.startswith("nodes")).split("\t")
    rows = [line.split("\t") for line in lines if line.startswith("64\t")]
    assert titles == ["nodes", "tokens/s", "GB", "days", "device-hours", "GPU-hours", "layout"]
    assert 2 <= len(rows) <= 10 and [row for row in rows if row[-1].endswith("*")]
    for row in rows:  # LUMI bills a whole MI250X, which is two devices
        device_hours, billed = (float(cell.replace(",", "")) for cell in row[4:6])
        assert billed == pytest.approx(device_hours / 2, abs=1)
