"""Names of layouts: as a person types them, no two layouts under one, and parts of them found again."""

import itertools

import pytest

from kielo.plan.layout_name import layout_name, matches
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout

PLAIN = {"tensor": 8, "pipeline": 4, "shard": 16, "context": 2}
CHANGES = [
    {}, {"tensor": 4}, {"pipeline": 8}, {"shard": 8}, {"replicate": 2, "shard": 8},
    {"replicate": 16, "shard": 1},
    {"replicate": 2, "shard": 16}, {"context": 4}, {"sequence_parallel": False}, {"zero": 2}, {"zero": 3},
    {"cpu_offload": True},
    {"context_attention": "ulysses"}, {"pipeline_schedule": "gpipe"},
    {"pipeline_schedule": "interleaved_1f1b"},
    {"pipeline_schedule": "interleaved_1f1b", "pipeline_stages_per_rank": 4},
    {"pipeline_schedule": "interleaved_zero_bubble"}, {"pipeline_schedule": "zbv"},
    {"pipeline_schedule": "dualpipev"},
    {"pipeline_layers": (20, 20, 20, 20)}, {"pipeline_layers": (21, 20, 20, 19)}, {"recompute": "attention"},
    {"recompute": "operators"}, {"recompute": "operators", "recompute_saved_operators": ("mm", "add")},
    {"recompute": "full"}, {"recompute": "full", "recompute_every_layers": 2}, {"shard": 0},
    {"replicate": 2, "shard": 0},
    {"compile": True}, {"compile": False}, {"tensor_overlap": "chunked"}, {"alibi_kernel": "bias"},
]  # fmt: skip


def layout(**changes) -> Layout:
    return Layout(**(PLAIN | changes))


def test_names_read_as_people_say_them():
    assert layout_name(layout(recompute="full", context=1), 1) == "tp8-pp4-dp16-mb1-zero1-1f1b-full"
    assert layout_name(Layout(shard=1), 4) == "dp1-mb4-zero1"
    assert layout_name(Layout(shard=1, tensor=8, sequence_parallel=False), 4) == "tp8-nosp-mb4-zero1"
    assert (
        layout_name(layout(replicate=2, shard=8, pipeline_schedule="zbv"), 2)
        == "tp8-pp4-cp2-dp16-hsdp8-mb2-zero1-zbv"
    )


def test_every_field_of_a_layout_is_in_its_name():
    """Whatever differs between two layouts that run differently gives two names,
    and only its own name finds it again.
    """
    several = [(layout(**change), micro_batch) for change in CHANGES for micro_batch in (1, 2)]
    names = [layout_name(*each) for each in several]
    assert len(set(names)) == len(names)
    for name, each in zip(names, several):
        assert matches(name)(*each)
        # A name that leaves the usual unsaid also lets in layouts that say more: no other field may differ
        # unseen.
        for other in several:
            assert not matches(name)(*other) or set(name.split("-")) <= set(layout_name(*other).split("-"))
    assert {field for change in CHANGES for field in change} | {"expert"} == set(Layout.model_fields)


def test_the_usual_number_of_stages_may_be_said_or_not():
    said = layout(pipeline_schedule="interleaved_1f1b", pipeline_stages_per_rank=2)
    assert layout_name(said, 1) == layout_name(layout(pipeline_schedule="interleaved_1f1b"), 1)


@pytest.mark.parametrize(
    "wanted",
    ["tp8pp4", "TP8×PP4", "tp8 x pp4", "tp8xPP4", "pp4,tp8", "tp 8 pp=4", "tp8-pp41f1b", " tp8-pp4- "],
)
def test_a_partial_name_is_typed_in_many_ways(wanted):
    assert matches(wanted)(layout(), 1)
    assert matches(wanted)(layout(context=1, zero=3, recompute="full"), 7)
    assert not matches(wanted)(layout(tensor=4), 1)
    assert not matches(wanted)(layout(pipeline=8), 1)


@pytest.mark.parametrize(
    ("wanted", "changes"),
    [
        ("tp1pp1", {"tensor": 1, "pipeline": 1}), ("norecompute sp allgather", {}),
        ("interleaved pp4", CHANGES[14]),
        ("interleaved4", CHANGES[15]), ("zb", CHANGES[16]),
        ("interleaved_1f1b", CHANGES[15]), ("pp4 interleaved 1f1b", CHANGES[14]),
        ("interleaved_zero_bubble", CHANGES[16]),
        ("pp4 ZBV mb2", CHANGES[17]), ("dp32 hsdp16", CHANGES[6]),
        ("Full/2", CHANGES[25]), ("saved_mm+add", CHANGES[23]), ("layers21+20+20+19", CHANGES[20]),
    ],
)  # fmt: skip
def test_words_that_may_be_asked_for(wanted, changes):
    assert matches(wanted)(layout(**changes), 2)
    assert not matches(wanted)(layout(tensor=2, pipeline=2, recompute="attention"), 1)


@pytest.mark.parametrize("wanted", ["tp8 ep4", "zero4", "fully", "pp", "", "×"])
def test_words_that_are_none_are_refused_with_those_that_are(wanted):
    with pytest.raises(KieloError, match="tp8, pp4, cp2, dp16"):
        matches(wanted)


def test_full_names_leave_no_order_to_guess():
    words = layout_name(layout(), 1).split("-")
    for some in itertools.permutations(words, 3):
        assert matches(" ".join(some))(layout(), 1)
