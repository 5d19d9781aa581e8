"""`kielo plan` as it is typed: the ranking, its refusals, comparisons, reasons, pictures, and no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kielo.cli.main import main
from kielo.cli.plan import SUBVERBS
from kielo.recipe.read import shipped_recipes

ESTONIAN = ["estonian_llama31_70b", "--cluster", "lumi_g"]


def ask(capsys, *words: str) -> dict:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_ranking_and_its_reasons(capsys) -> None:
    """Parts add up; memory is held against what is usable; every layout that is not listed has its reason."""
    found = ask(capsys, *ESTONIAN, "--nodes", "4..16")
    assert [layout["nodes"] for layout in found["layouts"]] == sorted(
        layout["nodes"] for layout in found["layouts"]
    )
    assert {layout["nodes"] for layout in found["layouts"]} == {4, 8, 16}
    for layout in found["layouts"]:
        assert sum(layout["seconds"].values()) == pytest.approx(layout["step_seconds"])
        assert sum(layout["bytes"].values()) == pytest.approx(layout["peak_bytes"])
        assert layout["fits"] and layout["peak_bytes"] <= layout["usable_bytes"] < 70e9
        assert layout["tokens_per_second"] == pytest.approx(
            layout["tokens_per_step"] / layout["step_seconds"]
        )
        assert layout["cost"]["jobs"] >= 1 and layout["cost"]["device_hours"] > 0
    assert any("needs more than" in reason["why"] for reason in found["not_listed"]["4"])
    assert found["own"]["8"]["fits"]
    assert main(["plan", *ESTONIAN, "--nodes", "4", "--wide"]) == 0
    text = capsys.readouterr().out
    assert "tokens/s" in text and "the recipe's own layout" in text and "\twhy not\n" in text


def test_variants_that_do_not_fit_are_in_no_sum(capsys) -> None:
    """33 billion parameters do not fit a node. Safe hours are by another engine's published speed."""
    found = ask(capsys, "viking", "--nodes", "1")
    assert list(found["variants"]) == ["7b", "13b"] and list(found["refused"]) == ["33b"]
    assert (
        " GB on rank 0 (as every rank), of 66.2 usable; changes that make it fit" in found["refused"]["33b"]
    )
    costs = [one["cost"] for one in found["variants"].values()]
    for hours in ("safe_device_hours", "device_hours", "billed_hours"):
        assert found[hours] == pytest.approx(sum(one[hours] for one in costs))
    assert main(["plan", "viking", "--nodes", "1"]) == 0
    text = capsys.readouterr().out
    told = f"safe {found['safe_device_hours']:,.0f} device-hours ("
    assert (
        f"\nall 2 together that fit: {told}" in text and "\nleft out of the sum: 33b\n33b: On 1 node " in text
    )
    for words in (["--wide"], ["--all"], ["--nodes", "16,32"]):
        assert main(["plan", "viking", *words]) == 1
        assert "for one of 3 variants. Fix: --set variant=7b" in capsys.readouterr().err


def test_comparing_and_why(capsys, tmp_path: Path) -> None:
    """Seed 000's question: both layouts side by side, a verdict with its reason,
    and a picture of the pipeline.
    """
    compared = ask(capsys, "compare", *ESTONIAN, "tp8pp4", "tp8pp8", "--nodes", "16", "--plot", str(tmp_path))
    assert [
        (layout["layout"]["tensor"], layout["layout"]["pipeline"]) for layout in compared["compared"]
    ] == [(8, 4), (8, 8)]
    assert main(["plan", "explain", *ESTONIAN, "tp8pp4-1f1b", "--nodes", "16", "--plot", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    entry = '[[layouts]]\ncluster = "lumi_g"\nnodes = [16]\nmicro_batch_sequences = 2\n'
    assert "bubble" in text and f"\n{entry}[layouts.layout]\npipeline = 4\ntensor = 8\n" in text
    pictures = {path.name.split("_")[0] for path in tmp_path.iterdir()}
    assert pictures == {"compared.svg", "timeline"}
    assert main(["plan", *ESTONIAN, "--nodes", "4,8", "--plot", str(tmp_path)]) == 0
    assert (tmp_path / "scaling_estonian_llama31_70b_lumi_g.svg").read_text().startswith("<?xml")


BAD = {
    "more nodes than there are": ([*ESTONIAN, "--nodes", "4000"], "2978"),
    "no nodes": ([*ESTONIAN, "--nodes", "0"], "1 to 2978"),
    "not a number": ([*ESTONIAN, "--nodes", "many"], "4..256"),
    "no nodes given": ([*ESTONIAN, "--set", "nodes=[]"], "--nodes 16"),
    "a batch smaller than the ranks": (
        [*ESTONIAN, "--nodes", "256", "--set", "train.tokens_per_step=4096"],
        "tokens_per_step = ",
    ),
    "too large for the nodes": ([*ESTONIAN, "--nodes", "1"], "Fix: 4 nodes"),
    "a layout that does not fit": (["explain", *ESTONIAN, "tp8pp2-mb1", "--nodes", "2"], "usable"),
    "layers that do not divide": (["explain", *ESTONIAN, "tp8pp128", "--nodes", "128"], "at most 81 stages"),
    "no such layout": (["explain", *ESTONIAN, "tp8pp5", "--nodes", "4"], "tp8pp5"),
    "no such layout to compare": (["compare", *ESTONIAN, "tp8pp4", "tp8pp5", "--nodes", "4"], "tp8pp5"),
    "not a layout": (["explain", *ESTONIAN, "tpp8", "--nodes", "4"], "tpp8"),
    "too short a job": ([*ESTONIAN, "--nodes", "16", "--wall-hours", "0.1"], "--wall-hours"),
    "several numbers of nodes explained": (["explain", *ESTONIAN, "tp8pp4", "--nodes", "4..8"], "one number"),
    "no card for a processor": (
        ["estonian_llama31_70b", "--set", 'cluster="laptop"'],
        "kielo plan calibrate",
    ),
    "ranks and a layout to resolve": (["resolve", *ESTONIAN, "--ranks", "2", "--layout", "tp8"], "--ranks"),
    "measurements that are not there": (["calibrate", "metrics.jsonl", "--to", "card.toml"], "metrics.jsonl"),
    "a recipe that is called like a word": (["./compare.toml", "--nodes", "4"], "compare.toml"),
}


@pytest.mark.parametrize(("words", "would_work"), BAD.values(), ids=BAD.keys())
def test_nonsense_is_refused_with_what_would_work(words, would_work, capsys) -> None:
    assert main(["plan", *words]) == 1
    assert would_work in capsys.readouterr().err


MISUSED = {
    "ranks without a word": ([*ESTONIAN, "--ranks", "2"], "unrecognized arguments: --ranks 2"),
    "nothing to compare": (["compare", *ESTONIAN], "required: LAYOUT"),
    "nothing to explain": (["explain", *ESTONIAN], "required: LAYOUT"),
    "nowhere to write": (["calibrate", "metrics.jsonl"], "required: --to"),
    "a word without a recipe": (["resolve"], "required: RECIPE"),
}


@pytest.mark.parametrize(("words", "complaint"), MISUSED.values(), ids=MISUSED.keys())
def test_a_word_needs_its_arguments(words, complaint, capsys) -> None:
    assert main(["plan", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_each_word_has_its_help(capsys) -> None:
    """`kielo plan --help` lists the words, and each has flags and an example of its own;
    no shipped recipe is called so.
    """
    assert not set(SUBVERBS) & set(shipped_recipes())
    for words in ([], *([word] for word in SUBVERBS)):
        assert main(["plan", *words, "--help"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(" ".join(["usage: kielo plan", *words, "["])) and "example: kielo plan" in text
        assert all(word in text for word in (words or SUBVERBS))


def test_it_needs_no_torch() -> None:
    """Planning loads no torch, and no matplotlib until something is drawn."""
    code = (
        "import sys; from kielo.cli.main import main; "
        f"assert main({['plan', *ESTONIAN, '--nodes', '16', '--json']!r}) == 0; "
        "assert not {'torch', 'matplotlib', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
