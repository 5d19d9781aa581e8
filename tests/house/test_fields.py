"""Every field that a user may write is read by some room: a setting that does nothing is a lie."""

import shutil

from pydantic import BaseModel

from kielo.recipe import cards, sections
from kielo.recipe.sections import BatchRamp, Fp8, Recipe, Source
from kielo.resolve.resolved import Identity, LearningRateSegment, PhasePlacement, Placement, PlannedPhase
from kielo.resolve.shares import AXES
from tests.house.checks import PACKAGE, attributes_read

# Declaring a field and checking it against others is not using it.
NO_USE = ("recipe/sections.py", "recipe/check.py", "recipe/without_effect.py", "recipe/schema.py")


def unread_fields(package, model: type[BaseModel], section: str, leaving_out=NO_USE) -> list[str]:
    read = attributes_read(package, leaving_out)
    return [
        f"{section}.{name}"
        for name in model.model_fields
        if not read.get(name, set()) & NAMES_OF.get(section, {section})
    ]


# What code calls a section that it was given.
NAMES_OF = {
    "model": {"model", "config"},
    "source": {"source", "sources"},
    "spikes": {"settings", "_settings"},
    "part_of_speech": {"settings"},
    "phase": {"phase", "phases", "phasesteps"},
    "placed": {"placed", "phases", "placement"},
    "language": {"card", "cards", "language", "self"},
    "cluster": {"card", "cards", "cluster", "site"},
    "jobs": {"jobs", "of_site", "jobs_of_site"},
    "partition": {"partition", "partitions", "one", "queue", "usual"},
    "accelerator": {"card", "cards", "accelerator"},
}


def unread_of_recipe(package) -> list[str]:
    found = unread_fields(package, Recipe, "recipe") + unread_fields(package, Source, "source")
    found += unread_fields(package, sections.Phase, "phase") + unread_fields(package, BatchRamp, "ramp")
    found += unread_fields(package, sections.PartOfSpeech, "part_of_speech")
    found += unread_fields(package, Fp8, "fp8") + unread_fields(package, sections.Spikes, "spikes")
    for name, info in Recipe.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found += unread_fields(package, info.annotation, name)
    return found


def test_every_recipe_field_is_read():
    """Each is read as an attribute of its section somewhere outside the declarations; mesh axes by name."""
    axes = {f"layout.{axis}" for axis in AXES}
    assert set(unread_of_recipe(PACKAGE)) - axes == set()


def test_every_resolved_field_is_read():
    """And what resolving made of it is read by the rooms above resolve."""
    # For people, who see them in resolved.toml and `kielo plan`; the first two also tell runs apart.
    shown = {
        "identity.name",
        "identity.language",
        "placement.accelerator",
        "placement.tokenizer_folder",
        "placed.micro_batches_per_step",
    }
    leaving_out = ("resolve/resolve.py", "resolve/resolved.py", *NO_USE)
    found = unread_fields(PACKAGE, Identity, "identity", leaving_out)
    found += unread_fields(PACKAGE, Placement, "placement", leaving_out)
    leaving_out = ("resolve/planned_phases.py", "resolve/resolve.py", *NO_USE)
    found += unread_fields(PACKAGE, PlannedPhase, "phase", leaving_out) + unread_fields(
        PACKAGE, LearningRateSegment, "segment", leaving_out
    )
    found += unread_fields(PACKAGE, PhasePlacement, "placed", leaving_out)
    assert set(found) - shown == set()


def test_every_field_of_a_card_is_read():
    """Every field is used by a plan or stands in a script, or tells people where a figure is from."""
    for_people = {
        *("language.notes", "language.characters_coverage"),
        *("accelerator.date", "accelerator.notes"),
    }
    found = unread_fields(PACKAGE, cards.Language, "language") + unread_fields(
        PACKAGE, cards.Cluster, "cluster"
    )
    found += unread_fields(PACKAGE, cards.Jobs, "jobs") + unread_fields(PACKAGE, cards.Partition, "partition")
    found += unread_fields(PACKAGE, cards.Accelerator, "accelerator")
    assert set(found) == for_people


def test_a_field_that_nobody_reads_is_caught(tmp_path):
    """Broken on purpose: without the room that evaluates, the fields of [evaluate] are named."""
    house = tmp_path / "kielo"
    shutil.copytree(PACKAGE, house, ignore=shutil.ignore_patterns("__pycache__", "evaluate"))
    assert {"evaluate.temperature", "evaluate.ngram_order"} <= set(unread_of_recipe(house))
