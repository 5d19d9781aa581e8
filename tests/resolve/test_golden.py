"""Every version of the format of `resolved.toml` and of stored identities is read as what it meant."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kielo.artifact.checkpoint_index import read_index
from kielo.artifact.run_format import FORMAT_VERSION
from kielo.recipe.errors import KieloError
from kielo.resolve.resolve import consent
from kielo.resolve.resolved import as_stored_now, read, read_identity, stored_identity, write
from tests.resolve.golden_runs import GOLDEN, RECIPES, golden_recipe, golden_resolved

VERSIONS = sorted(GOLDEN.glob("version_*"))


def as_file(name: str, folder: Path) -> dict[str, Any]:
    write(golden_resolved(name), folder / "resolved.toml")
    return tomllib.loads((folder / "resolved.toml").read_text(encoding="utf-8"))


def test_every_version_has_golden_files():
    assert [folder.name for folder in VERSIONS] == [f"version_{n}" for n in range(FORMAT_VERSION + 1)]


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("name", RECIPES)
def test_a_golden_file_is_the_run_that_its_recipe_makes_now(folder, name):
    """Also the identity of its checkpoint, which a run of this code then goes on from."""
    assert read(folder / f"{name}.toml") == golden_resolved(name)
    if name == "tiny":
        stored = read_index(folder / "checkpoint").plain["identity"]
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


def test_keys_that_version_0_did_not_always_have():
    """What was added to version 0 with a default may be missing."""
    stored = json.loads((GOLDEN / "version_0" / "checkpoint" / "index.json").read_text())["plain"]["identity"]
    added = ("skip_steps", "precision_changes", "fp8", "optimiser_state")
    older = {key: value for key, value in stored.items() if key not in added}
    assert read_identity(older, "older") == read_identity(stored, "newer")
    assert as_stored_now(older, "older") == as_stored_now(stored, "newer")


def test_a_run_from_before_keeps_its_order_of_samples_or_is_refused(tmp_path):
    """Where several sources are mixed, version 1 shared out by blocks: another rule is refused, naming the
    key that goes on. One source alone has the same order by both."""
    stored = json.loads((GOLDEN / "version_1" / "checkpoint" / "index.json").read_text())["plain"]["identity"]
    recipe = golden_recipe("tiny")
    dataset = recipe.dataset.model_copy(update={"mixture_order": "every_sample"})
    changed = golden_resolved("tiny", recipe=recipe.model_copy(update={"dataset": dataset}))
    with pytest.raises(KieloError, match=r"(?s)phases.1.mixture_order.*--set dataset.mixture_order=blocks"):
        consent(read_identity(stored, "old"), changed)
    stored["phases"][0]["mixture"] = {"books": 1.0}
    assert read_identity(stored, "old").phases[0].mixture_order == "every_sample"


def test_a_later_version_is_refused_naming_file_and_versions(tmp_path):
    """In `resolved.toml` and in a checkpoint. A version that is none is refused as well."""
    path = tmp_path / "resolved.toml"
    write(golden_resolved("tiny"), path)
    text = path.read_text(encoding="utf-8")
    for version, words in ((7, f"is of format version 7.*up to {FORMAT_VERSION}"), ('"x"', "no version")):
        path.write_text(text.replace(f"format_version = {FORMAT_VERSION}", f"format_version = {version}"))
        with pytest.raises(KieloError, match=f"resolved.toml: .*{words}"):
            read(path)
    shutil.copy(VERSIONS[-1] / "checkpoint" / "index.json", tmp_path)
    index = json.loads((tmp_path / "index.json").read_text(encoding="utf-8"))
    index["plain"]["identity"]["format_version"] = 7
    (tmp_path / "index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(KieloError, match="index.json: is of format version 7"):
        read_index(tmp_path)


def test_tables_that_no_version_wrote_are_refused(tmp_path):
    """A broken file of version 0 is no traceback."""
    path = tmp_path / "resolved.toml"
    for text in (
        "identity = 3\n[placement]\n",
        "[identity]\n",
        "[identity]\n[placement]\npipeline = 'two'\n",
    ):
        path.write_text(text)
        with pytest.raises(KieloError, match="resolved.toml: is not of format version 0"):
            read(path)
    with pytest.raises(KieloError, match="index.json: describes no run"):
        read_identity(3, "index.json")


@pytest.mark.parametrize("name", RECIPES)
def test_a_resolved_layout_typed_into_the_recipe_gives_the_same_run(name, tmp_path):
    """`placement.layout` is a layout that a person could have written."""
    resolved = golden_resolved(name)
    recipe = golden_recipe(name).model_copy(update={"layout": resolved.placement.layout})
    assert golden_resolved(name, recipe=recipe) == resolved
