"""The table of what each torch runs: complaints name versions and ways out, and the docs show the table."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kielo.models.families import complete
from kielo.plan.remedies import speed_advice
from kielo.recipe.sections import Layout, Model
from kielo.resolve.software import COMPILED_SPLIT_BACKWARD, SCHEDULE_LIMITS, TRIED, as_tried
from tests.resolve.rule_cases import layout_complaints

MODEL = complete(Model(
    hidden_size=2048, intermediate_size=5632, num_attention_heads=16, num_key_value_heads=4, head_dim=128,
    num_hidden_layers=8, vocab_size=32000, max_position_embeddings=4096,
), 4096)  # fmt: skip
V = {"pipeline": 2, "pipeline_schedule": "zbv"}
SHARED = {"tensor": 2, "compile": True}


def table() -> Iterator[str]:
    yield f"| | {' | '.join(TRIED)} | otherwise |"
    yield "|---" * (len(TRIED) + 2) + "|"
    for limit in (*SCHEDULE_LIMITS.values(), COMPILED_SPLIT_BACKWARD):
        marks = ("yes" if version in limit.works_on else "no" for version in TRIED)
        yield f"| `{limit.what}` | {' | '.join(marks)} | {limit.otherwise} |"


def complaints(version: str, **layout) -> list[str]:
    return layout_complaints(MODEL, 4096, Layout(**layout), torch_version=version)


@pytest.mark.parametrize(
    ("layout", "works_on", "instead"),
    [
        (V, ["2.13"], {"pipeline_schedule": "1f1b"}),
        (V | {"pipeline_schedule": "dualpipev"}, ["2.13"], {"pipeline_schedule": "interleaved_1f1b"}),
        (V | {"pipeline_schedule": "interleaved_zero_bubble"}, ["2.13"], {"pipeline_schedule": "1f1b"}),
        (SHARED | {"recompute": "full"}, list(TRIED), {}),
        ({"pipeline": 2, "pipeline_schedule": "1f1b", "compile": True}, list(TRIED), {}),
    ],
)
def test_a_version_that_does_not_run_a_layout_is_named_with_what_would_work(layout, works_on, instead):
    for version in TRIED:
        found = complaints(version + ".0", **layout)
        assert (found == []) == (version in works_on), version
        if found:
            assert len(found) == 1 and f"on torch {version}.0" in found[0]
            assert f"works on torch {' and '.join(works_on)}" in found[0]
            ((key, value),) = instead.items()
            assert str(value).lower() in found[0].partition("Fix: ")[2]
        assert complaints(version, **(layout | instead)) == []


def test_a_version_that_was_not_tried_counts_as_the_one_before_it():
    assert [as_tried(version) for version in ("2.9.1", "2.10.0+rocm7", "2.12.1", "2.14.0a0", "3.0")] == [
        "2.10", "2.10", "2.11", "2.13", "2.13",
    ]  # fmt: skip


def test_a_schedule_of_one_stage_is_none():
    """Without a pipeline nothing is asked of torch."""
    assert complaints("2.10", pipeline=1, pipeline_schedule="zbv") == []
    assert speed_advice(MODEL, Layout(pipeline=1, pipeline_schedule="zbv", compile=True), "h200") == []


def test_compiled_layers_under_a_split_backward_are_advised_against():
    (advice,) = speed_advice(MODEL, Layout(**V, compile=True), "h200")
    assert "backward twice" in advice and "layout.compile = false" in advice
    assert speed_advice(MODEL, Layout(**V, compile=False), "h200") == []


def test_the_docs_show_the_table():
    text = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in text
