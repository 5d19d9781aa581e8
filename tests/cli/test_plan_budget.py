"""`kielo plan --budget` as it is typed: amounts at their limits, refusals, and what the table has."""

import json
from pathlib import Path

import pytest

from kielo.cli.main import main

ASKED = ["plan", "--corpus", "6.6B"]


def answer(capsys, *words: str) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("budget", "flops"), [("1e12", 1e12), ("1e30", 1e30), ("1e22FLOPs", 1e22), (" 10_000e18 ", 1e22)]
)
def test_flops_are_counted_as_they_are(budget, flops, capsys) -> None:
    assert answer(capsys, *ASKED, "--budget", budget)["flops"] == flops


@pytest.mark.parametrize("budget", ["9.99e11", "1.01e30", "nan", "inf", "-1e22", "0", "much", "60B", ""])
def test_other_amounts_are_refused(budget, capsys) -> None:
    assert main([*ASKED, f"--budget={budget}"]) == 1
    assert capsys.readouterr().err == (
        f"kielo: --budget {budget!r} is not an amount of compute. Fix: device-hours, such as 20000h, "
        "or FLOPs, such as 1e22\n"
    )


def test_hours_are_of_the_devices_of_a_cluster(capsys) -> None:
    """By --cluster or the recipe's; not of none, nor of those whose speed no card has. 0 hours are none."""
    assert main([*ASKED, "--budget", "1.5M GPU-hours", "--cluster", "dgx_h100"]) == 0
    flops = 1.5e6 * 3600 * 989e12 * 0.35
    assert capsys.readouterr().out.startswith(
        f"1,500,000 device-hours of dgx_h100 at 35% of 989 TFLOP/s: {flops:.3g} FLOPs, and a text of 6.6B "
        "different tokens.\n"
    )
    found = answer(capsys, *ASKED, "--budget", "1h", "--set", "cluster=dgx_h100")
    assert found["flops"] == pytest.approx(3600 * 989e12 * 0.35) and len(found["choices"]) == 2
    assert found["unique_tokens"] == 6_600_000_000 and found["max_epochs"] == 4
    for words, why in {
        (): "--budget in device-hours needs a cluster. Fix: --cluster lumi_g, or FLOPs, such as 1e22",
        ("--params", "3B"): "--budget in device-hours needs a cluster",
        ("--cluster", "laptop"): "no card has the peak speed of a device of laptop. Fix: FLOPs, such as 1e22",
    }.items():
        assert main([*ASKED, "--budget", "5h", *words]) == 1
        assert capsys.readouterr().err.startswith(f"kielo: {why}")
    assert main([*ASKED, "--budget", "0h", "--cluster", "dgx_h100"]) == 1
    assert "'0h' is not an amount of compute" in capsys.readouterr().err


def test_the_text_is_counted_in_tokens(capsys) -> None:
    """One is the least; without any the recipe's text counts, if it has one."""
    assert answer(capsys, "plan", "--budget", "1e12", "--corpus", "1")["unique_tokens"] == 1
    fix = "Fix: the number of different tokens, as --corpus 6.6B"
    for corpus in ("0", "all", "-3"):
        assert main(["plan", "--budget", "1e22", f"--corpus={corpus}"]) == 1
        said = capsys.readouterr().err
        assert said == f"kielo: --corpus {corpus!r} is not a number of tokens. {fix}\n"
    for words in ([], ["--params", "3B"]):
        assert main(["plan", "--budget", "1e22", *words]) == 1
        assert capsys.readouterr().err == f"kielo: --budget needs an amount of text. {fix}\n"
    assert main(["plan", "--corpus", "6.6B"]) == 1
    assert "--corpus needs --budget. Fix: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag",
    [["--nodes", "4"], ["--top", "1"], ["--wide"], ["--all"], ["--plot", "x"], ["--wall-hours", "3"]],
    ids=lambda flag: flag[0],
)
def test_flags_of_layouts_are_refused(flag, capsys) -> None:
    assert main([*ASKED, "--budget", "1e22", *flag]) == 1
    assert capsys.readouterr().err == (
        f"kielo: {flag[0]} is about layouts, and --budget about scaling laws. Fix: one of them\n"
    )


def test_a_size_and_a_length_have_rows(capsys) -> None:
    """A machine alone has none; --params has a size; a recipe with a budget of tokens its length too."""
    asked = [*ASKED, "--budget", "1e20"]
    machine = answer(capsys, *asked, "--cluster", "lumi_g")
    assert [row["what"] for row in machine["choices"]] == ["unlimited text", "this text"]
    sized = answer(capsys, *asked, "--params", "300M")
    assert [row["what"] for row in sized["choices"]] == ["unlimited text", "this text", "this size"]
    row = sized["choices"][-1]
    assert row["parameters"] == pytest.approx(3e8, rel=0.05) and row["flops"] == pytest.approx(1e20)
    assert row["tokens"] == pytest.approx(1e20 / 6 / row["parameters"])
    assert row["epochs"] == row["tokens"] / min(6.6e9, row["tokens"]) and row["law"] == "repetition"
    long = answer(capsys, *asked, "--params", "300M", "--set", "train.tokens=9G")
    assert long["choices"][-1]["what"] == "the recipe" and long["choices"][-1]["tokens"] == 9e9
    assert long["complaints"] == []


def test_text_that_is_read_too_often_is_refused(capsys, tmp_path: Path) -> None:
    """9 billion tokens of 2: 4.5 times. The table is printed before; as JSON the exit code tells."""
    asked = ["plan", "--budget", "1e20", "--corpus", "2B", "--params", "300M", "--set", "train.tokens=9G"]
    assert main([*asked, "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert len(said["complaints"]) == 1 and said["max_epochs"] == 4
    assert main(asked) == 1
    screen = capsys.readouterr()
    assert screen.err == f"kielo: training would refuse this: {said['complaints'][0]}\n"
    titles = "\tparameters\ttokens\tepochs\texpected loss\tby the law of\n"
    assert titles in screen.out and "\nthe recipe\t" in screen.out
    assert "\t9B\t4.50\t" in screen.out and "\trepetition\n" in screen.out
    assert main([*asked, "--set", "dataset.max_epochs=4.5"]) == 0
