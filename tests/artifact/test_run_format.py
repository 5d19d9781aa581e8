"""Runs that earlier versions described are read as this version describes them."""

import pytest

from kielo.artifact.run_format import migrated_identity, migrated_run
from kielo.recipe.errors import KieloError


def test_formats_of_earlier_versions() -> None:
    """Version 3 has one order of samples, and leaves no sequence out; no other key is lost."""
    phases = [{"number": 1, "mixture_order": "every_sample"}, {"mixture_order": "blocks_of_256"}, {}]
    stored = {"format_version": 2, "name": "x", "phases": phases}
    migrated = {"name": "x", "phases": [{"number": 1}, {"mixture_order": "blocks_of_256"}, {}]}
    assert migrated_identity(stored, "f") == {"format_version": 3} | migrated
    assert migrated_identity({"format_version": 2, "a": 1}, "f") == {
        "format_version": 3, "a": 1, "phases": [],
    }  # fmt: skip
    placement = {"ranks": 4, "train": {"log_every_steps": 5, "max_left_out_sequences": 7}}
    run = {"format_version": 2, "identity": {"name": "x", "phases": phases}, "placement": placement}
    assert migrated_run(run, "f") == {
        "identity": migrated, "placement": {"ranks": 4, "train": {"log_every_steps": 5}},
    }  # fmt: skip
    now = {"format_version": 3, "identity": {"phases": phases}, "placement": {"a": 1}}
    assert migrated_run(now, "f") == {"identity": {"phases": phases}, "placement": {"a": 1}}


@pytest.mark.parametrize(
    ("stored", "version", "way"),
    [
        ({"format_version": 4}, 4, "a later one"),
        ({"format_version": 1}, 1, "another run folder to begin again"),
        ({"format_version": 0}, 0, "another run folder to begin again"),
        ({"name": "x"}, 0, "another run folder to begin again"),
    ],
)
def test_versions_that_are_not_read(stored: dict, version: int, way: str) -> None:
    said = f"^f: is of format version {version}, and this Kielo reads versions 2 to 3. Fix: the Kielo"
    with pytest.raises(KieloError, match=f"{said} that wrote it, or {way}$"):
        migrated_identity(stored, "f")
    with pytest.raises(KieloError, match=said):
        migrated_run(stored, "f")


def test_what_describes_no_run() -> None:
    for wrong in (-1, "1", 0.5):
        with pytest.raises(KieloError, match="format_version = .* is no version of the format"):
            migrated_identity({"format_version": wrong}, "f")
    with pytest.raises(KieloError, match="says format version 2, but its content does not fit"):
        migrated_run({"format_version": 2, "identity": {}}, "f")
    with pytest.raises(KieloError, match="describes no run, but contains 5"):
        migrated_identity(5, "f")
