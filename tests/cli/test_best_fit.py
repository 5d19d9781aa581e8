"""Best-fit packing from a recipe's key to the documents of a step."""

import json
import re
from pathlib import Path

import pytest

from kielo.artifact.manifest import read_manifest
from kielo.cli.main import main
from kielo.recipe.read import read_recipe
from kielo.resolve.resolve import resolve
from tests.cli.test_run import write_recipe

PHASES = "[{tokens = 12800, learning_rate = 1e-3}, {tokens = 12800, sequence_length = 640}]"
LENGTHS = (320, 640)
SETS = ["dataset.packing=best_fit", f"phases={PHASES}"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    path = write_recipe(tmp_path_factory.mktemp("packed"))
    text = path.read_text(encoding="utf-8").replace("tokens = 2560\n", "")
    text = text.replace("sequence_length = 16", "sequence_length = 320").replace(
        "_step = 128", "_step = 1280"
    )
    path.write_text(text, encoding="utf-8")
    return path


def with_sets(*words: str | Path) -> list[str]:
    return [*map(str, words), *(part for one in SETS for part in ("--set", one))]


def test_packing_is_told_and_done_once(recipe, capsys):
    """Before packing a plan is made without; pack says what is cut at each length; a rerun has nothing to do,
    and one stream of the same tokens needs nothing new. A run asks for what is missing."""
    assert main(["run", str(recipe), "--to", "pack", "--set", f"phases={PHASES}"]) == 0
    capsys.readouterr()
    assert main(with_sets("data", recipe, "--step", "1")) == 1
    assert "packing: has no packed sequences" in capsys.readouterr().err
    assert main(with_sets("plan", "data", recipe)) == 0
    assert "documents cut" not in capsys.readouterr().out
    assert main(with_sets("run", recipe, "--only", "pack")) == 0
    out = capsys.readouterr().out
    counts = read_manifest(recipe.parent / "run" / "packing").counts["sources"]["text"]
    for length in LENGTHS:
        of = counts[str(length)]
        assert f"text: {of['sequences']} sequences of {length} tokens, " in out
        assert of["cut_documents"] < of["cut_in_one_stream"]
    assert main(with_sets("run", recipe, "--only", "pack")) == 0
    again = capsys.readouterr().out
    assert "nothing to do" in again and "sequences of" not in again
    assert main([*with_sets("data", recipe, "--step", "1"), "--set", "dataset.sequence_length=64"]) == 1
    assert "has no sequences of 64 tokens" in capsys.readouterr().err


def test_the_run_is_planned_and_asked_about_with_packed_sequences(recipe, capsys, monkeypatch):
    """Epochs count packed sequences, a phase of another length begins an epoch of its own, and every token of
    a step that is no filling is in a document that `kielo data` names."""
    assert main(with_sets("run", recipe, "--to", "pack")) == 0
    counts = read_manifest(recipe.parent / "run" / "packing").counts["sources"]["text"]
    read = read_recipe(str(recipe), SETS).recipe
    identity = resolve(read, recipe.parent / "run", 1, "cpu").identity
    first, second = identity.phases
    assert first.packing == second.packing == "best_fit" and first.offsets == {}
    begun = -(-40 // counts["320"]["sequences"])  # epochs of the first phase's 40 sequences
    assert second.offsets == {"text": begun * counts["640"]["sequences"] * 640}
    capsys.readouterr()
    assert main(with_sets("plan", "data", recipe, "--json")) == 0
    table = json.loads(capsys.readouterr().out)
    assert [row["sequence_length"] for row in table["packing"]] == list(LENGTHS)
    filling = table["packing"][0]["filling"]
    assert 0 < filling < 0.5
    assert table["phases"][0]["epochs"] == pytest.approx(40 / counts["320"]["sequences"])
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(with_sets("plan", "data", recipe)) == 0
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    lines = printed[printed.index("best-fit packed") :].splitlines()
    assert "documents cut" in lines[0] and f"{filling:.3%}" in printed and max(map(len, lines)) <= 80
    for step, length in ((first.last_step, 320), (second.last_step, 640)):
        assert main(with_sets("data", recipe, "--step", str(step), "--json")) == 0
        rows = json.loads(capsys.readouterr().out)
        of_sample = [sum(row["tokens"] for row in rows if row["sample"] == at["sample"]) for at in rows]
        assert length * 0.8 < max(of_sample) <= length and min(of_sample) > 0
        assert len({row["document"] for row in rows}) > 1
