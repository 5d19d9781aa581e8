"""`kielo verify`: the proof that is asked for, its table or JSON, and exit code 1 if it fails."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.cli.main import main
from kielo.recipe.read import read_recipe
from kielo.stages.results import certify
from tests.cli.test_run import write_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


class Parity:
    """Stands in for the proof. current: the certificate that is there already."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: Any = None
        self.asked: list[tuple] = []
        self.passed = True
        # First: what is imported here for the first time must not take the stand-ins below for its own.
        monkeypatch.setattr("kielo.verify.parity.verify_parity", self.verify)
        monkeypatch.setattr("kielo.stages.results.newest_checkpoint", lambda run: run / "newest")
        monkeypatch.setattr("kielo.stages.results.read_state", lambda folder: {"of": folder.name})
        monkeypatch.setattr("kielo.stages.results.check_tokens", lambda *given: self.asked.append(given))
        monkeypatch.setattr("kielo.stages.results.read", lambda path: path.name)
        monkeypatch.setattr("kielo.stages.results.current_certificate", lambda *what: self.current)
        monkeypatch.setattr("kielo.stages.results.print_parity", lambda made: print(made.content()))

    def certificate(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(content=lambda: {"made": name}, passed=self.passed, FILE_NAME="parity.json")

    def verify(self, *what: Any) -> SimpleNamespace:
        self.asked.append(what)
        return self.certificate("now")


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Parity:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "resolved.toml").touch()
    return Parity(monkeypatch)


@pytest.mark.parametrize("passed", [True, False])
def test_parity_is_certified_and_told(passed, proof, recipe, tmp_path, capsys) -> None:
    """With the numbers of the recipe, or --steps; one that is there already is printed, too."""
    proof.passed, run = passed, tmp_path / "run"
    code = 0 if passed else 1
    assert main(["verify", "parity", str(recipe)]) == code
    told = f"certificate: {run / 'verify' / 'parity.json'}\n"
    assert capsys.readouterr().out == "{'made': 'now'}\n" + told
    checked, (resolved, folder, checkpoint, options) = proof.asked
    assert checked == ({"of": "newest"}, run)
    assert (resolved, folder, checkpoint) == ("resolved.toml", run / "verify", run / "newest")
    assert (options.steps, options.sequence_length) == (2, 16)
    assert main(["verify", "parity", str(recipe), "--steps", "1", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == {"made": "now"} and proof.asked[-1][3].steps == 1
    proof.current = proof.certificate("before")
    proof.asked.clear()
    assert main(["verify", "parity", str(recipe)]) == code
    assert capsys.readouterr().out == "{'made': 'before'}\n" + told and len(proof.asked) == 1


def test_kielo_run_prints_a_certificate_that_it_makes(proof, recipe, tmp_path, capsys) -> None:
    read = read_recipe(str(recipe)).recipe
    assert certify(read, tmp_path / "run", shows_current=False).content() == {"made": "now"}
    assert capsys.readouterr().out == "{'made': 'now'}\n"
    proof.current = proof.certificate("before")
    assert certify(read, tmp_path / "run", shows_current=False) is proof.current
    assert capsys.readouterr().out == ""


def test_what_has_no_proof_is_refused(proof, recipe, tmp_path, capsys) -> None:
    for verb in ("parity", "layouts"):
        for steps in ("0", "-1"):
            assert main(["verify", verb, str(recipe), "--steps", steps]) == 1
            assert capsys.readouterr().err == f"kielo: --steps {steps}: give 1 or more\n"
    encoder = ["model.model_type=ltg_bert", "model.position_bucket_size=8", "train.objective=masked_tokens"]
    sets = [word for one in encoder for word in ("--set", one)]
    assert main(["verify", "parity", str(recipe), *sets]) == 1
    assert "Fix: kielo verify layouts, or kielo verify round-trip" in capsys.readouterr().err
    (tmp_path / "run" / "resolved.toml").unlink()
    assert main(["verify", "parity", str(recipe)]) == 1
    first = f"{tmp_path / 'run'} has no resolved.toml yet. Fix: kielo run {recipe} --to train"
    assert capsys.readouterr().err == f"kielo: {first}\n" and proof.asked == []


@pytest.mark.parametrize("passed", [True, False])
def test_layouts_are_tabled(passed, recipe, tmp_path, capsys, monkeypatch) -> None:
    made, asked = {"passed": passed, "cases": []}, []

    def verify(recipe: Any, *given: Any, steps: int) -> dict:
        asked.append((*given, steps))
        return made

    monkeypatch.setattr("kielo.verify.layouts.verify_layouts", verify)
    monkeypatch.setattr("kielo.verify.screens.layouts_table", lambda of: (("case", "loss"), [("tensor2", 1)]))
    monkeypatch.setattr("kielo.verify.screens.layouts_verdict", lambda of: f"passed: {of['passed']}")
    assert main(["verify", "layouts", str(recipe)]) == 1 - passed
    folder = tmp_path / "run" / "layouts"
    said = capsys.readouterr().out
    assert said.startswith(f"case\tloss\ntensor2\t1\npassed: {passed}\ncertificate: {folder}/")
    words = ["--case", "a", "--case", "b*", "--steps", "1", "--json"]
    assert main(["verify", "layouts", str(recipe), *words]) == 1 - passed
    assert json.loads(capsys.readouterr().out) == made
    assert asked == [(folder, None, 10), (folder, ["a", "b*"], 1)]


@pytest.mark.parametrize("passed", [True, False])
def test_a_round_trip_is_tabled(passed, capsys, monkeypatch) -> None:
    """Messages of the export are on stderr under --json."""
    made, asked = {"passed": passed, "left_out": [], "source": "nowhere"}, []

    def verify(weights: str, keep: Path | None) -> dict:
        print("exporting")
        asked.append((weights, keep))
        return made

    monkeypatch.setattr("kielo.verify.round_trip.verify_round_trip", verify)
    monkeypatch.setattr("kielo.verify.round_trip.table", lambda of: (("tensor", "same"), [("head", "yes")]))
    monkeypatch.setattr("kielo.verify.round_trip.verdict", lambda of: "the verdict")
    assert main(["verify", "round-trip", "hf:a/b"]) == 1 - passed
    assert capsys.readouterr() == ("exporting\ntensor\tsame\nhead\tyes\nthe verdict\n", "")
    made["left_out"] = ["x.bin", "y.bin"]
    assert main(["verify", "round-trip", "hf:a/b", "--keep", "here"]) == 1 - passed
    assert "\nleft out, because they are not weights: x.bin, y.bin\nthe verdict\n" in capsys.readouterr().out
    assert main(["verify", "round-trip", "hf:a/b", "--json"]) == 1 - passed
    said = capsys.readouterr()
    assert json.loads(said.out) == made and said.err == "exporting\n"
    assert asked == [("hf:a/b", None), ("hf:a/b", Path("here")), ("hf:a/b", None)]


@pytest.mark.parametrize("passed", [True, False])
def test_position_heads_are_tabled(passed, capsys, monkeypatch) -> None:
    made = {
        "passed": passed,
        "losses": {"one": 1.23456, "two": 2},
        "hidden_tokens": 1234,
        "source": "nowhere",
    }
    monkeypatch.setattr("kielo.verify.source_folder.verify_position_heads", lambda weights, text: made)
    monkeypatch.setattr("kielo.verify.source_folder.position_heads_verdict", lambda of: "the verdict")
    assert main(["verify", "position-heads", "hf:a/b", "t.txt"]) == 1 - passed
    assert capsys.readouterr().out == (
        "position_heads\tnats a hidden token, of 1,234\none\t1.2346\ntwo\t2.0000\nthe verdict\n"
    )
    assert main(["verify", "position-heads", "hf:a/b", "t.txt", "--json"]) == 1 - passed
    assert json.loads(capsys.readouterr().out) == made
