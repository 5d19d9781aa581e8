"""A recipe that follows another one: `kielo run` makes the weights that it starts from."""

import shutil
from pathlib import Path

import pytest

from kielo.artifact.manifest import read_manifest
from kielo.artifact.weights_folder import resolve_weights
from kielo.cli.main import main
from kielo.recipe.errors import KieloError
from tests.cli.test_run import write_recipe

FOLLOWER = """
extends = "{first}"
name = "{name}"
folder = "{folder}"
follows = "{follows}"

[tokenizer]
vocab_size = 300

[model]
weights = "hf:{first.parent}/run/hf"
transplant = "mean"
"""


def write_follower(first: Path, name: str, follows: Path | None = None, folder: Path | None = None) -> Path:
    """A recipe that goes on with the weights of `first`, with another vocabulary."""
    path = first.parent / f"{name}.toml"
    given = {"first": first, "name": name, "folder": folder or first.parent / name}
    path.write_text(FOLLOWER.format(**given, follows=follows or first), encoding="utf-8")
    return path


def test_the_first_run_is_made_as_far_as_its_weights(tmp_path, capsys):
    """One command makes both, without proof and report of the first one; again, nothing is to do. The first
    one's vocabulary is not replaced under the second one's training.
    """
    first = write_recipe(tmp_path)
    follower = write_follower(first, "follower")
    assert main(["run", str(follower), "--to", "train"]) == 0
    assert "══ tiny, which follower follows" in capsys.readouterr().out
    made = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"corpus", "tokenizer", "tokens", "train", "hf", "recipe.toml"} <= made
    assert not {"verify", "evaluate"} & made
    section = read_manifest(tmp_path / "follower" / "tokenizer").section
    assert section["transplant"] == "mean" and section["vocab_size"] == 300
    assert read_manifest(tmp_path / "follower" / "train") is not None
    assert main(["run", str(tmp_path / "follower"), "--to", "train"]) == 0
    out = capsys.readouterr().out
    assert out.count("nothing to do") == 5 + 4 and "step" not in out
    shutil.rmtree(tmp_path / "run")
    first.write_text(first.read_text().replace("vocab_size = 320", "vocab_size = 310"), encoding="utf-8")
    assert main(["run", str(follower), "--to", "train"]) == 1
    assert "tokenizer of model.weights" in capsys.readouterr().err
    assert read_manifest(tmp_path / "follower" / "tokenizer").section == section


def test_cleaning_alone_needs_no_weights(tmp_path, capsys):
    follower = write_follower(write_recipe(tmp_path), "follower")
    assert main(["run", str(follower), "--to", "corpus"]) == 0
    assert not (tmp_path / "run").exists() and "══" not in capsys.readouterr().out


def test_what_cannot_follow_is_refused(tmp_path, capsys):
    """A chain of three, two recipes of one folder, other weights, and a recipe that is not there; before
    anything is made.
    """
    first = write_recipe(tmp_path)
    second = write_follower(first, "second")
    refusals = {
        write_follower(first, "third", follows=second): f"`kielo run {second}`, then this",
        write_follower(first, "same", folder=tmp_path / "run"): "a folder of this run that Kielo replaces",
        write_follower(first, "missing", follows=tmp_path / "none.toml"): "none.toml': ",
    }
    for path, told in refusals.items():
        assert main(["run", str(path), "--to", "tokenizer"]) == 1
        assert told in capsys.readouterr().err
    assert main(["run", str(second), "--set", f"model.weights=hf:{tmp_path}"]) == 1
    assert f"--set model.weights=hf:{tmp_path / 'run' / 'hf'}" in capsys.readouterr().err
    assert main(["run", str(first), "--set", f"follows={second}"]) == 1
    assert "model.weights is not given" in capsys.readouterr().err
    assert not any((tmp_path / name).exists() for name in ("run", "second", "third", "same", "missing"))


def test_weights_of_a_run_that_is_not_finished_say_what_makes_them():
    with pytest.raises(KieloError, match="no folder runs/first/hf, which the stage export of a run makes"):
        resolve_weights("hf:runs/first/hf")
