"""`kielo plan` as it is typed: the ranking, its refusals, comparisons, reasons, pictures, and no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kielo.cli.main import main

ESTONIAN = ["plan", "estonian_llama31_70b", "--cluster", "lumi_g"]


def ask(capsys, *words: str) -> dict:
    assert main([*ESTONIAN, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_ranking_and_its_reasons(capsys) -> None:
    """Parts add up; memory is held against what is usable; every layout that is not listed has its reason."""
    found = ask(capsys, "--nodes", "4..16")
    assert [layout["nodes"] for layout in found["layouts"]] == sorted(layout["nodes"] for layout in found["layouts"])
    assert {layout["nodes"] for layout in found["layouts"]} == {4, 8, 16}
    for layout in found["layouts"]:
        assert sum(layout["seconds"].values()) == pytest.approx(layout["step_seconds"])
        assert sum(layout["bytes"].values()) == pytest.approx(layout["peak_bytes"])
        assert layout["fits"] and layout["peak_bytes"] <= layout["usable_bytes"] < 70e9
        assert layout["tokens_per_second"] == pytest.approx(layout["tokens_per_step"] / layout["step_seconds"])
        assert layout["cost"]["jobs"] >= 1 and layout["cost"]["device_hours"] > 0
    assert any("needs more than" in reason["why"] for reason in found["not_listed"]["4"])
    assert found["own"]["4"]["fits"]
    assert main([*ESTONIAN, "--nodes", "4"]) == 0
    text = capsys.readouterr().out
    assert "tokens/s" in text and "the recipe's own layout" in text and "not listed, for example" in text


def test_comparing_and_why(capsys, tmp_path: Path) -> None:
    """Seed 000's question: both layouts side by side, a verdict with its reason, and a picture of the pipeline."""
    compared = ask(capsys, "--nodes", "16", "--compare", "tp8pp4,tp8pp8", "--plot", str(tmp_path))
    assert [(layout["layout"]["tensor"], layout["layout"]["pipeline"]) for layout in compared["compared"]] == [(8, 4), (8, 8)]
    assert main([*ESTONIAN, "--nodes", "16", "--why", "tp8pp4-1f1b", "--plot", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "bubble" in text and "[layout]\npipeline = 4\ntensor = 8" in text
    pictures = {path.name.split("_")[0] for path in tmp_path.iterdir()}
    assert pictures == {"compared.svg", "timeline"}
    assert main([*ESTONIAN, "--nodes", "4,8", "--plot", str(tmp_path)]) == 0
    assert (tmp_path / "scaling_estonian_llama31_70b_lumi_g.svg").read_text().startswith("<?xml")


BAD = {
    "more nodes than there are": (["--nodes", "4000"], "2978"),
    "no nodes": (["--nodes", "0"], "1 to 2978"),
    "not a number": (["--nodes", "many"], "4..256"),
    "no nodes given": ([], "--nodes 16"),
    "a batch smaller than the ranks": (["--nodes", "256", "--set", "train.tokens_per_step=4096"], "tokens_per_step = "),
    "too large for the nodes": (["--nodes", "1"], "what would work: 4 nodes"),
    "a layout that does not fit": (["--nodes", "2", "--why", "tp8pp2-mb1"], "usable"),
    "layers that do not divide": (["--nodes", "128", "--why", "tp8pp128"], "at most 81 stages"),
    "no such layout": (["--nodes", "4", "--why", "tp8pp5"], "tp8pp5"),
    "not a layout": (["--nodes", "4", "--why", "tpp8"], "tpp8"),
    "too short a job": (["--nodes", "16", "--wall-hours", "0.1"], "--wall-hours"),
    "a ranking of several for --why": (["--nodes", "4..8", "--why", "tp8pp4"], "one number"),
    "no card for a processor": (["--set", 'cluster="laptop"'], "--from-measurement"),
    "ranks without --resolve": (["--ranks", "2"], "--resolve"),
    "nowhere to write": (["--from-measurement", "metrics.jsonl"], "--to"),
}


@pytest.mark.parametrize(("words", "would_work"), BAD.values(), ids=BAD.keys())
def test_nonsense_is_refused_with_what_would_work(words, would_work, capsys) -> None:
    start = ESTONIAN[:2] if "laptop" in " ".join(words) else ESTONIAN
    assert main([*start, *words]) == 1
    assert would_work in capsys.readouterr().err


def test_it_needs_no_torch() -> None:
    """Nor matplotlib, until something is drawn."""
    code = (
        "import sys; from kielo.cli.main import main; "
        f"assert main({[*ESTONIAN, '--nodes', '16', '--json']!r}) == 0; "
        "assert not {'torch', 'matplotlib', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
