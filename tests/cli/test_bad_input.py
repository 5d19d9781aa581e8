"""A verb refuses input that cannot work: exit code 1 (2 for usage), a message that names it,
and nothing made.
"""

import subprocess
import sys

import pytest

from kielo.cli.main import main
from tests.cli.test_run import write_recipe

BAD = {
    "no such recipe": (["show", "demo_estoniann"], "demo_estonian"),
    "unknown key": (["show", "demo_estonian", "--set", "train.token=1"], "train.tokens"),
    "wrong type": (["show", "demo_estonian", "--set", "train.tokens=many"], "train.tokens"),
    "no value": (["show", "demo_estonian", "--set", "train.tokens"], "section.key=value"),
    "missing source": (
        ["run", "demo_estonian", "--set", "folder=out", "--set", "corpus.sources=gone.txt"],
        "gone.txt",
    ),
    "stages in the wrong order": (
        ["run", "demo_estonian", "--from", "pack", "--to", "corpus"],
        "corpus, tokenizer",
    ),
    "only with from": (["run", "demo_estonian", "--only", "pack", "--from", "pack"], "--only"),
    "a stage before its input": (
        ["run", "demo_estonian", "--set", "folder=out", "--only", "train"],
        "tokenizer",
    ),
    "no ranks": (["run", "demo_estonian", "--ranks", "0"], "--ranks 0"),
    "no run to verify": (["verify", "parity", "demo_estonian", "--set", "folder=out"], "resolved.toml"),
    "no run to list": (["checkpoint", "list", "out"], "run folder"),
    "no checkpoint to export": (["export", "out", "--to", "hf"], "no folder, checkpoint or recipe"),
    "no text to measure on": (["tokenizer", "measure", "out", "--text", "gone.txt"], "gone.txt"),
    "no tokenizer to measure": (["tokenizer", "measure", "out", "--text", "here.txt"], "out"),
    "unknown recipe to copy": (["recipes", "--copy", "demo"], "demo_estonian"),
    "unknown cluster": (["plan", "demo_estonian", "--cluster", "lumi_x"], "lumi_g"),
    "a folder without a recipe to judge it": (["evaluate", "."], "RECIPE"),
    "no folder to evaluate": (["evaluate", "gone", "demo_estonian"], "gone"),
}

RUN = ["run", "demo_estonian", "--set", "folder=out", "--set", "corpus.sources=here.txt", "--set"]
FOCUS = [*RUN, "model.weights=hf:OWNER/NAME", "--set", "model.transplant=focus", "--set"]
# Each before the text is cleaned.
BAD |= {
    "no vectors": ([*FOCUS, "model.transplant_vectors=gone.vec"], "gone.vec': no such file. Fix"),
    "vectors of no format": ([*FOCUS, "model.transplant_vectors=here.txt"], "here.txt: line 1 is 'üks rida'"),
    "arrays of no format": ([*FOCUS, "model.transplant_vectors=here.npz"], "here.npz: cannot be read as"),
    "no ready tokenizer": (
        [*RUN, "tokenizer.path=hf:./gone"],
        "tokenizer 'hf:./gone': the folder ./gone does not exist",
    ),
    "no weights": (
        [*RUN, "model.weights=hf:./gone", "--set", "model.transplant=mean"],
        "there is no folder ./gone",
    ),
    "weights without a vocabulary": (
        [*RUN, "model.weights=hf:.", "--set", "model.transplant=mean"],
        ". has no tokenizer.json, ",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_nothing_is_made(name, tmp_path, monkeypatch, capsys):
    """Exit code 1, one message on stderr that names the culprit or the fix,
    no traceback, no output.
    """
    monkeypatch.chdir(tmp_path)
    for here in ("here.txt", "here.npz"):
        (tmp_path / here).write_text("üks rida\n", encoding="utf-8")
    arguments, named = BAD[name]
    assert main(arguments) == 1
    message = capsys.readouterr().err
    assert message.startswith("kielo: ") and named in message
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.stem != "here"]
    assert left == []


def test_an_empty_corpus_fails_with_the_shares_kept(tmp_path, capsys):
    """English text under an Estonian recipe: refused, with the share that each threshold would keep."""
    recipe = write_recipe(tmp_path)
    english = tmp_path / "english.txt"
    english.write_text("The committee will meet again next week to discuss this.\n" * 3, encoding="utf-8")
    assert main(["run", str(recipe), "--set", f"corpus.sources={english}", "--to", "corpus"]) == 1
    message = capsys.readouterr().err
    assert "threshold" in message and not (tmp_path / "run" / "corpus").exists()


def test_usage_is_two_and_help_shows_an_example(capsys):
    """An unknown verb ends with 2; every verb's help has an example that starts with the program's name."""
    assert subprocess.run([sys.executable, "-m", "kielo", "fly"], capture_output=True).returncode == 2
    for verb in (
        "run",
        "train",
        "plan",
        "verify",
        "evaluate",
        "export",
        "tokenizer",
        "checkpoint",
        "data",
        "show",
    ):
        assert main([verb, "--help"]) == 0
        assert f"example: kielo {verb}" in capsys.readouterr().out


def test_a_recipe_is_copied_once_and_works_from_where_it_lies(tmp_path, monkeypatch, capsys):
    """`recipes --copy` never overwrites; the copy is a recipe."""
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "--copy", "demo_estonian"]) == 0
    assert main(["show", "demo_estonian.toml"]) == 0
    assert main(["recipes", "--copy", "demo_estonian"]) == 1
    assert "exists already" in capsys.readouterr().err
