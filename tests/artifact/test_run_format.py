"""Runs that earlier versions described are read as this version describes them."""

import pytest

from kielo.artifact.run_format import migrated_identity, migrated_run
from kielo.recipe.errors import KieloError


def identity_0() -> dict:
    return {
        "name": "x",
        "mask_documents": True,
        "weight_decay": 0.1,
        "phases": [{"mixture": {"a": 1, "b": 1}}],
    }


def test_formats_of_earlier_versions() -> None:
    """Keys move to the tables of their sections; phases say how samples are shared out; no key is lost."""
    assert migrated_identity(identity_0(), "f") == {
        "format_version": 2, "name": "x", "dataset": {"mask_documents": True}, "train": {"weight_decay": 0.1},
        "phases": [{"mixture": {"a": 1, "b": 1}, "mixture_order": "blocks_of_256"}],
    }  # fmt: skip
    one = {"format_version": 1, "phases": [{"mixture": {"a": 1}}, {}]}
    assert migrated_identity(one, "f")["phases"] == [
        {"mixture": {"a": 1}, "mixture_order": "every_sample"}, {"mixture_order": "every_sample"},
    ]  # fmt: skip
    placement = {
        "ranks": 4, "pipeline": 2, "pipeline_layers": [1, 2, 3, 4], "log_every_steps": 5,
        "checkpoint_every_steps": 7, "keep_newest": 2,
    }  # fmt: skip
    assert migrated_run({"identity": identity_0(), "placement": placement}, "f")["placement"] == {
        "ranks": 4, "train": {"log_every_steps": 5}, "checkpoint": {"every_steps": 7, "keep_newest": 2},
        "layout": {"compile": False, "recompute_saved_operators": [], "pipeline": 2,
                   "pipeline_layers": [1, 2, 3, 4], "pipeline_stages_per_rank": 2},
    }  # fmt: skip
    alone = migrated_run({"identity": {}, "placement": {"pipeline": 1, "pipeline_layers": [4]}}, "f")
    assert alone["placement"]["layout"] == {"compile": False, "recompute_saved_operators": [], "pipeline": 1}
    now = {"format_version": 2, "identity": {"phases": []}, "placement": {"a": 1}}
    assert migrated_run(now, "f") == {"identity": {"phases": []}, "placement": {"a": 1}}
    with pytest.raises(KieloError, match="f: is of format version 3, and this Kielo reads versions up to 2"):
        migrated_identity({"format_version": 3}, "f")
    for wrong in (-1, "1", 0.5):
        with pytest.raises(KieloError, match="format_version = .* is no version of the format"):
            migrated_identity({"format_version": wrong}, "f")
    with pytest.raises(KieloError, match="is not of format version 0"):
        migrated_run({"identity": {}}, "f")
    with pytest.raises(KieloError, match="describes no run, but holds 5"):
        migrated_identity(5, "f")
