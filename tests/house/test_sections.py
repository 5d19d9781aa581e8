"""A knob is declared once: what a recipe says goes into `resolved.toml` without an edit in resolve/."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter

from pydantic import BaseModel

from kielo.recipe import sections
from kielo.recipe.sections import (
    Checkpoint,
    CompleteModel,
    Dataset,
    DatasetIdentity,
    Layout,
    Model,
    Recipe,
    RecipeIdentity,
    Train,
    TrainIdentity,
    TrainPlacement,
    TrainSchedule,
)
from kielo.resolve.resolved import Identity, Placement
from tests.house.checks import PACKAGE


def declared_twice(identity: type[BaseModel], placement: type[BaseModel]) -> list[str]:
    """Keys of a recipe that a part of `resolved.toml` declares itself, beside the sections that it embeds."""
    knobs = {name for section in (Layout, Train, Checkpoint, Dataset, Model) for name in section.model_fields}
    inherited = set(RecipeIdentity.model_fields)
    own = [*(identity.model_fields.keys() - inherited), *placement.model_fields]
    return sorted(name for name in own if name in knobs)


def test_identity_and_placement_embed_the_sections_whole():
    """Each is one class of the recipe; what they declare themselves is no key of a section."""
    embedded = {
        Identity: {"model": CompleteModel, "dataset": DatasetIdentity, "train": TrainIdentity},
        Placement: {"layout": Layout, "train": TrainPlacement, "checkpoint": Checkpoint},
    }
    for part, expected in embedded.items():
        assert {name: part.model_fields[name].annotation for name in expected} == expected
    assert list(CompleteModel.model_fields) == list(Model.model_fields)
    assert issubclass(Identity, RecipeIdentity) and issubclass(Recipe, RecipeIdentity)
    assert declared_twice(Identity, Placement) == []


def test_a_key_declared_twice_is_caught():
    class WithMore(Identity):
        weight_decay: float

    assert declared_twice(WithMore, Placement) == ["weight_decay"]


def test_each_key_of_train_says_by_its_class_what_becomes_of_it():
    """It is in one of three classes, and [train] has no others."""
    declared = Counter(
        name for part in (TrainSchedule, TrainIdentity, TrainPlacement) for name in part.model_fields
    )
    assert set(declared) == set(Train.model_fields) and set(declared.values()) == {1}


PLACES = {
    "TrainIdentity": ("identity", "train"),
    "DatasetIdentity": ("identity", "dataset"),
    "Model": ("identity", "model"),
    "TrainPlacement": ("placement", "train"),
    "Layout": ("placement", "layout"),
    "Checkpoint": ("placement", "checkpoint"),
}
SCRIPT = """
import sys
from kielo.recipe.read import read_recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.text import imagined_text
from kielo.resolve.resolved import read, write
recipe = read_recipe("demo_estonian", sys.argv[1:]).recipe
write(resolve(recipe, "run", 1, "cpu", text=imagined_text(recipe)), "resolved.toml")
print(read("resolved.toml").model_dump_json())
"""


def test_a_new_knob_needs_no_edit_in_resolve(tmp_path):
    """A field planted in each class of sections.py, and nowhere else, is resolved, written and read.

    A key of [model] is also in the table that says which models have it.
    """
    house = tmp_path / "kielo"
    shutil.copytree(PACKAGE, house, ignore=shutil.ignore_patterns("__pycache__"))
    path = house / "recipe" / "sections.py"
    text = path.read_text(encoding="utf-8")
    for section in PLACES:
        head, declaration, rest = text.partition(f"class {section}(Section):")
        first = rest.index(f"    {next(iter(getattr(sections, section).__annotations__))}: ")
        text = head + declaration + rest[:first] + "    planted_knob: int = 3\n" + rest[first:]
    path.write_text(text, encoding="utf-8")
    table = house / "models" / "config_keys.py"
    text = table.read_text(encoding="utf-8")
    assert text.count("_OF_THE_RECIPE = (") == 1
    table.write_text(
        text.replace("_OF_THE_RECIPE = (", '_OF_THE_RECIPE = ("planted_knob", '), encoding="utf-8"
    )
    sets = [
        f"{table}.planted_knob={number}"
        for number, (_, table) in enumerate(PLACES.values())
        if table != "train"
    ]
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, *sets, "train.planted_knob=9"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"},
    )
    assert found.returncode == 0, found.stderr
    resolved = json.loads(found.stdout)
    for number, (part, table) in enumerate(PLACES.values()):
        assert resolved[part][table]["planted_knob"] == (9 if table == "train" else number)
