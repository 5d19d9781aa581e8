"""Every version of the format of `resolved.toml` and of stored identities is read as what it meant."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kielo.artifact.checkpoint_index import read_index, read_plain
from kielo.artifact.run_format import FORMAT_VERSION, OLDEST_VERSION
from kielo.recipe.errors import KieloError
from kielo.resolve.resolve import consent
from kielo.resolve.resolved import as_stored_now, read, read_identity, stored_identity, write
from tests.resolve.golden_runs import GOLDEN, RECIPES, golden_recipe, golden_resolved

VERSIONS = sorted(GOLDEN.glob("version_*"))


def as_file(name: str, folder: Path) -> dict[str, Any]:
    write(golden_resolved(name), folder / "resolved.toml")
    return tomllib.loads((folder / "resolved.toml").read_text(encoding="utf-8"))


def test_every_version_has_golden_files():
    numbers = range(OLDEST_VERSION, FORMAT_VERSION + 1)
    assert [folder.name for folder in VERSIONS] == [f"version_{n}" for n in numbers]


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("name", RECIPES)
def test_a_golden_file_is_the_run_that_its_recipe_makes_now(folder, name):
    """Also the identity of its checkpoint, which a run of this code then goes on from."""
    assert read(folder / f"{name}.toml") == golden_resolved(name)
    if name == "tiny":
        stored = read_index(folder / "checkpoint").plain.identity
        assert as_stored_now(stored, folder) == stored_identity(golden_resolved(name).identity)
        consent(read_identity(stored, folder), golden_resolved(name))


@pytest.mark.parametrize("name", RECIPES)
def test_the_format_does_not_change_without_a_new_version(name, tmp_path):
    """Whatever the golden file of this version says, this code writes. A key with a default may be new."""
    golden = tomllib.loads((VERSIONS[-1] / f"{name}.toml").read_text(encoding="utf-8"))
    assert _common(as_file(name, tmp_path), golden) == golden


def _common(written: Any, golden: Any) -> Any:
    """Returns `written` without the keys that `golden` lacks."""
    if isinstance(golden, dict) and isinstance(written, dict):
        return {key: _common(written[key], golden[key]) for key in golden.keys() & written.keys()}
    if isinstance(golden, list) and isinstance(written, list) and len(golden) == len(written):
        return [_common(one, other) for one, other in zip(written, golden)]
    return written


def test_what_version_2_left_out_is_no_longer_kept():
    """Its run of "tiny" left a sequence out, as train.max_left_out_sequences = 3 let it."""
    plain = read_plain(GOLDEN / "version_2" / "checkpoint")
    assert [(one["step"], one["sample"]) for one in plain["left_out"]] == [(3, 17)]
    assert "max_left_out_sequences = 3" in (GOLDEN / "version_2" / "tiny.toml").read_text(encoding="utf-8")
    assert "left_out" not in read_plain(GOLDEN / "version_3" / "checkpoint")


def test_a_run_in_the_order_of_blocks_is_refused():
    """Version 2 could go on with the order of samples of earlier versions; it is refused by name."""
    stored = json.loads((GOLDEN / "version_2" / "checkpoint" / "index.json").read_text())["plain"]["identity"]
    assert stored["phases"][0]["mixture_order"] == "every_sample"
    assert read_identity(stored, "every").phases
    stored["phases"][0]["mixture_order"] = "blocks_of_256"
    with pytest.raises(KieloError, match=r"blocks: describes its run with keys .*phases\.0\.mixture_order"):
        read_identity(stored, "blocks")


def test_other_versions_are_refused_naming_file_and_versions(tmp_path):
    """In `resolved.toml` and in a checkpoint. A version that is none is refused as well."""
    path = tmp_path / "resolved.toml"
    write(golden_resolved("tiny"), path)
    text = path.read_text(encoding="utf-8")
    this = f"and this Kielo reads versions {OLDEST_VERSION} to {FORMAT_VERSION}. Fix: the Kielo that"
    cases = {
        "7": f"is of format version 7, {this} wrote it, or a later one",
        "1": f"is of format version 1, {this} wrote it, or another run folder to begin again",
        '"x"': "no version",
    }
    for version, words in cases.items():
        path.write_text(text.replace(f"format_version = {FORMAT_VERSION}", f"format_version = {version}"))
        with pytest.raises(KieloError, match=f"resolved.toml: .*{words}"):
            read(path)
    shutil.copy(VERSIONS[-1] / "checkpoint" / "index.json", tmp_path)
    index = json.loads((tmp_path / "index.json").read_text(encoding="utf-8"))
    for version in (7, 1, 0):
        index["plain"]["identity"]["format_version"] = version
        if version == 0:  # which did not say it
            del index["plain"]["identity"]["format_version"]
        (tmp_path / "index.json").write_text(json.dumps(index), encoding="utf-8")
        with pytest.raises(KieloError, match=f"index.json: is of format version {version}, and this Kielo"):
            read_index(tmp_path)


def test_tables_that_no_version_wrote_are_refused(tmp_path):
    """A broken file of an older version is no traceback."""
    path = tmp_path / "resolved.toml"
    for text in (
        "identity = 3\n[placement]\n",
        "[identity]\n",
        "[identity]\n[placement]\ntrain = 'two'\n",
        "[identity]\nphases = [1]\n[placement]\n",
    ):
        path.write_text(f"format_version = 2\n{text}")
        with pytest.raises(
            KieloError, match="resolved.toml: says format version 2, but its content does not fit"
        ):
            read(path)
    with pytest.raises(KieloError, match="index.json: describes no run"):
        read_identity(3, "index.json")


@pytest.mark.parametrize("name", RECIPES)
def test_a_resolved_layout_typed_into_the_recipe_gives_the_same_run(name, tmp_path):
    """`placement.layout` is a layout that a person could have written."""
    resolved = golden_resolved(name)
    recipe = golden_recipe(name).model_copy(update={"layout": resolved.placement.layout})
    assert golden_resolved(name, recipe=recipe) == resolved
