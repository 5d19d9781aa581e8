"""The list of cases of `kielo verify layouts`, name by name, and what a name says of a case."""

import re
from collections import Counter
from itertools import product

import pytest

from kielo.recipe.errors import KieloError
from kielo.verify.layouts_cases import Case, all_cases, cases_that_run, chosen_cases

SCHEDULES = "{gpipe,1f1b,interleaved_1f1b,interleaved_zero_bubble,zbv,dualpipev}"
WHOLE = "{gpipe,1f1b,interleaved_1f1b}"  # the backward pass is one piece
SPLIT = "{interleaved_zero_bubble,zbv,dualpipev}"
SECOND = "{1f1b,interleaved_zero_bubble,dualpipev}"  # every second one
RECOMPUTED = "{attention,norms+activations,operators,full,full-every2}"
ATTENTIONS = "{all_gather,ulysses}"
# {a,b} stands for either.
NAMES = {
    "one axis": f"""
        one_rank-micro4  replicate2{{,-micro4}}  shard2{{,-zero2,-zero3}}{{,-micro4}}
        tensor2{{,-no_sequence}}{{,-micro4}}  tensor2-z_loss  shard2-cpu_offload
        context2-{ATTENTIONS}-{{documents,no_documents}}  context2-{ATTENTIONS}-micro4-documents
        {{shard2-zero3,tensor2}}-{{tied,untied}}  {{replicate2,shard2,shard2-zero3,tensor2}}-bf16
        context2-{ATTENTIONS}-documents-bf16""",
    "recomputation": f"{{shard2,shard2-zero3,tensor2,context2-all_gather}}-recompute_{RECOMPUTED}",
    "pairs": """
        {replicate2-shard2,replicate2-tensor2,shard2-tensor2}{,-bf16}
        {replicate2-context2,shard2-context2,context2-tensor2}-all_gather{,-bf16}
        {replicate2-shard2,shard2-tensor2}{,-zero2,-zero3}-micro2
        shard2-context2{,-zero2,-zero3}-all_gather-micro2
        {replicate2-context2,shard2-context2,context2-tensor2}-ulysses-micro2-documents
        shard2-tensor2-zero3-recompute_full-micro2-{tied,untied}  shard2-tensor2-zero3-no_sequence-micro2
        tensor4  context4-all_gather  shard4-zero3""",
    "threes": f"""
        replicate2-{{shard2-context2,context2-tensor2}}-all_gather  replicate2-shard2-tensor2
        shard2-context2-tensor2-all_gather{{,-tied,-untied,-bf16}}
        shard2-context2-tensor2-zero3-{ATTENTIONS}-recompute_full-micro4-documents""",
    "pipelines": f"""
        pipeline2-{SCHEDULES}-micro4{{,-tied,-untied,-documents-z_loss,-frozen,-bf16}}
        pipeline2-{SCHEDULES}-{{replicate2,shard2,tensor2,context2-all_gather,shard2-tensor2}}-micro4
        pipeline4-1f1b-micro4{{,-frozen}}  pipeline2-1f1b-micro8  pipeline2-interleaved_1f1b-micro2
        shard2-micro2-frozen  pipeline2-1f1b-layers4_0-micro4  pipeline2-zbv-layers2_1_1_0-micro4
        pipeline2-{WHOLE}-recompute_full-micro4  pipeline2-{SPLIT}-recompute_norms+activations-micro4
        pipeline2-{WHOLE}-shard2-{{zero2,zero3}}-micro4  pipeline2-1f1b-replicate2-shard2-zero2-micro2
        pipeline2-interleaved_1f1b-shard2-tensor2-zero2-micro4-tied  pipeline2-zbv-shard2-zero2-micro4
        pipeline2-{SECOND}-shard2-tensor2-micro4-tied-documents""",
    "compiled": f"""
        shard2-zero3-recompute_operators-compiled-micro4  pipeline2-1f1b-compiled-micro4
        tensor2{{,-recompute_full,-recompute_attention}}-compiled-micro4
        context2-{ATTENTIONS}-compiled-micro4""",
    "overlapped": """
        tensor2-chunked{,-micro4,-bf16,-compiled-micro4}  tensor4-chunked
        tensor2-chunked-recompute_{attention,norms+activations,operators,full}
        {replicate2,shard2}-tensor2-chunked-micro2  context2-tensor2-chunked-all_gather-micro2
        pipeline2-{1f1b,interleaved_zero_bubble}-tensor2-chunked-micro4""",
}


def expanded(pattern: str) -> list[str]:
    pieces = [piece.strip("{}").split(",") for piece in re.findall(r"\{[^}]*\}|[^{}]+", pattern)]
    return ["".join(chosen) for chosen in product(*pieces)]


def test_these_are_the_cases() -> None:
    """Each once, those on few ranks first."""
    cases = all_cases()
    names = [name for group in NAMES.values() for pattern in group.split() for name in expanded(pattern)]
    assert Counter(case.name for case in cases) == Counter(names)
    assert [case.ranks for case in cases] == sorted(case.ranks for case in cases)
    assert {case.ranks for case in cases} == {1, 2, 4, 8}
    for case in cases:
        assert case.switches.keys() <= {"tied", "documents", "z_loss", "frozen"}
        assert case.switches.get("z_loss", 1e-3) == 1e-3


@pytest.mark.parametrize(
    ("case", "name", "ranks"),
    [
        (Case({}), "one_rank", 1),
        (Case({}, switches={"frozen": False, "z_loss": 0.0, "tied": False}), "one_rank-untied-no_z_loss", 1),
        (Case({"replicate": 3, "shard": 5, "tensor": 7}, precision="x"), "replicate3-shard5-tensor7-x", 105),
        (
            Case({"pipeline": 2, "pipeline_schedule": "gpipe", "context": 3, "zero": 2}, micro_batches=2),
            "pipeline2-gpipe-context3-zero2-all_gather-micro2",
            6,
        ),
        (
            Case({"shard": 2, "recompute": "full", "recompute_every_layers": 3, "cpu_offload": True}),
            "shard2-cpu_offload-recompute_full-every3",
            2,
        ),
    ],
)  # fmt: skip
def test_a_name_tells_all_that_is_not_usual(case: Case, name: str, ranks: int) -> None:
    assert (case.name, case.ranks) == (name, ranks)


def test_patterns_choose_cases_in_the_list_s_order() -> None:
    """All without a pattern; one that fits nothing is refused with the beginnings of names that would fit."""
    assert chosen_cases(None) == chosen_cases([]) == all_cases()
    chosen = [case.name for case in chosen_cases(["tensor4*", "one_rank*"])]
    assert chosen == ["one_rank-micro4", "tensor4", "tensor4-chunked"]
    with pytest.raises(KieloError) as refused:
        chosen_cases(["tensor4", "tensor3"])
    assert str(refused.value) == (
        "--case tensor3: no such case. Fix: names and patterns that begin with context2, "
        "context4, one_rank, pipeline2, pipeline4, replicate2, shard2, shard4, tensor2, tensor4, such as "
        "one_rank-micro4 or 'context2*'"
    )


def test_an_encoder_leaves_out_untied_heads() -> None:
    """A decoder runs both; the reason names the family."""
    cases = [Case({"tensor": 2}, switches={"tied": tied}) for tied in (True, False)] + [Case({"shard": 2})]
    assert cases_that_run(cases, "2.13.0", "llama") == (cases, {})
    runs, left_out = cases_that_run(cases, "2.13.0", "modernbert")
    assert runs == [cases[0], cases[2]]
    assert left_out == {"the head of model.model_type = 'modernbert' is always tied": ["tensor2-untied"]}


def test_relative_positions_leave_out_context_ranks() -> None:
    """Under the first reason alone, if a case has two."""
    context = {"context": 2, "context_attention": "all_gather"}
    cases = [Case(context), Case({"tensor": 2}), Case(context, switches={"tied": False})]
    assert cases_that_run(cases, "2.13.0", "modernbert")[0] == cases[:2]
    runs, left_out = cases_that_run(cases, "2.13.0", "ltg_bert")
    ((reason, names),) = left_out.items()
    assert runs == cases[1:2] and names == [case.name for case in cases[::2]]
    assert reason == "the relative positions of model.model_type = 'ltg_bert' need whole sequences on a rank"
