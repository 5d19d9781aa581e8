"""What the search looks at: every layout of a small machine, listed by loops that know only its rules."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kielo.plan import search as searching
from kielo.plan.layout_name import layout_name
from kielo.plan.planned_layout import PlannedLayout
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import search
from kielo.recipe.sections import Layout
from tests.plan.hand_made import planned, run

AGAIN = [("none", 1), ("norms+activations", 1), ("operators", 1), ("full", 4), ("full", 2), ("full", 1)]
SCHEDULES = [("1f1b", 1), ("interleaved_zero_bubble", 2), ("zbv", 2), ("dualpipev", 2)]
LENGTH = 8192


def small(tokens_per_step: int = 64 * LENGTH, **sections) -> RunToPlan:
    """A model of eight layers on nodes of four devices, sequences of 8,192."""
    train = {"tokens": 10 * tokens_per_step, "tokens_per_step": tokens_per_step}
    return run(dataset={"sequence_length": LENGTH}, train=train, **sections)


def names_looked_at(of: RunToPlan, nodes: int) -> Counter[str]:
    """Returns how often the search looked at each layout."""
    seen: Counter[str] = Counter()

    def note(layout: Layout, micro_batch: int) -> bool:
        seen[layout_name(layout, micro_batch)] += 1
        return False

    search(of, [nodes], note)
    return seen


def every_layout(devices: int) -> Iterator[str]:
    """Yields names: tensor ranks in a node, and two context ranks of 4,096 tokens."""
    for tensor, context in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)):
        for pipeline in range(1, devices // (tensor * context) + 1):
            data, left = divmod(devices, tensor * context * pipeline)
            if left:
                continue
            # rounded up, two stages may lack a layer
            even = [each for each in (2, 3, 4, 5) if each * pipeline - 1 <= 8 and -8 % (each * pipeline) <= 2]
            rounds = [("interleaved_1f1b", each) for each in even]
            for schedule, each in [*SCHEDULES, *rounds] if pipeline > 1 else [("1f1b", 1)]:
                if pipeline > 1 and each * pipeline - 1 > 8:
                    continue
                splits = pipeline > 1 and schedule in ("interleaved_zero_bubble", "zbv", "dualpipev")
                for recompute, every in AGAIN[:2] if splits else AGAIN:
                    form = Layout(
                        tensor=tensor, context=context, pipeline=pipeline, pipeline_schedule=schedule,
                        pipeline_stages_per_rank=each if schedule == "interleaved_1f1b" else None,
                        recompute=recompute, recompute_every_layers=every,
                    )  # fmt: skip
                    yield from (f"{name}" for name in _of_data_ranks(form, data, splits))


def _of_data_ranks(form: Layout, data: int, splits: bool) -> Iterator[str]:
    """Yields each ZeRO degree, of all data ranks, or in a node with copies between nodes, and micro-batch."""
    inside = 4 / (form.tensor * form.context)
    for zero in (1, 2) if splits else (1, 2, 3):
        shapes = [(data, 1)] if data > 1 or zero == 1 else []
        if zero != 2 and inside > 1 and data % inside == 0 and data > inside:
            shapes.append((int(inside), int(data / inside)))
        for shard, copies in shapes:
            for size in (1, 2, 4, 8):
                keys = {"zero": zero, "shard": shard, "replicate": copies}
                yield layout_name(form.model_copy(update=keys), size)


@pytest.mark.parametrize("nodes", [1, 3])
def test_every_layout_is_looked_at_once(nodes):
    expected = Counter(every_layout(4 * nodes))
    found = names_looked_at(small(), nodes)
    assert found == expected and max(found.values()) == 1
    if nodes == 1:
        assert search(small(), [nodes]).looked_at == len(expected)


def test_several_numbers_of_nodes_are_looked_at_as_each_alone():
    """Pipelines of any of them are tried on those that they divide."""
    found = search(
        small(), [1, 3], lambda layout, size: layout.tensor == 4 and layout.zero == 1 and size == 2
    )
    names = {
        nodes: {one.name for layouts in found.refused[nodes].values() for one in layouts}
        | {one.name for one in found.ranked[nodes]} for nodes in (1, 3)
    }  # fmt: skip
    alone = {nodes: {name for name in every_layout(4 * nodes) if "tp4-" in name} for nodes in (1, 3)}
    wanted = {nodes: {name for name in of if "mb2-zero1" in name} for nodes, of in alone.items()}
    assert found.looked_at == sum(map(len, wanted.values()))
    assert all(some <= wanted[nodes] for nodes, some in names.items())


def test_of_wide_nodes_the_next_power_of_two_is_refused():
    of = small()
    wide = replace(of, site=of.site.model_copy(update={"devices_per_node": 12}))
    reasons = search(wide, [1], lambda layout, size: False).impossible
    (why,) = [why for why in reasons if why.startswith("tensor ranks beyond the 12 devices of a node")]
    assert [one.name for one in reasons[why]] == ["tp16-mb1-zero1"]


def test_a_layout_has_the_recipes_own_settings():
    """Of keys that are not searched."""
    names = names_looked_at(small(layout={"compile": False, "context_attention": "ulysses"}), 1)
    assert all("nocompile" in name and ("ulysses" in name or "cp" not in name) for name in names)


def test_what_no_number_of_nodes_makes_possible_is_told_with_its_reason():
    """Sixteen tensor ranks are the most that are spoken of; of context ranks of too few tokens each."""
    found = search(small(), [1, 2])
    reasons = {why: [one.name for one in layouts] for why, layouts in found.impossible.items()}
    tensor = "tensor ranks beyond the 4 devices of a node: each layer would wait for the network"
    assert reasons.pop(tensor) == ["tp8-mb1-zero1", "tp16-mb1-zero1"]
    context = "less than 4096 of a sequence's 8192 tokens on a context rank"
    places = ("", "tp2-", "tp4-")
    assert reasons.pop(context) == [f"{place}cp{ranks}-mb1-zero1" for place in places for ranks in (4, 8, 16)]
    assert all("model.num_hidden_layers = 8" in why or "heads" in why for why in reasons), reasons


def refused_names(of: RunToPlan, nodes: int = 2) -> dict[str, str]:
    return {one.name: why for why, layouts in search(of, [nodes]).refused[nodes].items() for one in layouts}


@pytest.fixture
def made_plans(monkeypatch) -> None:
    """Nothing is planned a second time."""
    monkeypatch.setattr(searching, "plan_layouts", lambda run, layouts, *more: [planned()] * len(layouts))


SPLIT = "fewer micro-batches than ranks, which leave a split backward pass nothing to fill"
STAGES = "fewer micro-batches than the schedule's stages"
SMALLER = "smaller micro-batches have fewer empty sequences"


def test_the_reasons_of_refused_layouts_are_those_of_shares(made_plans):
    """Six sequences, or five, on eight devices. A schedule may fill a quarter of its micro-batches."""
    six, five = (refused_names(small(tokens_per_step=number * LENGTH)) for number in (6, 5))
    few = "fewer sequences a step (6, by train.tokens_per_step) than data-parallel ranks"
    expected = {
        "dp8-mb1-zero1": few, "tp2-dp4-mb8-zero1": SMALLER, "tp4-dp2-mb4-zero1": SMALLER,
        "tp2-dp4-mb2-zero1": None,
        # two micro-batches of a rank, three, and six
        "pp2-dp4-mb1-zero1-zbv": None, "pp4-dp2-mb1-zero1-zbv": SPLIT, "pp4-dp2-mb1-zero1-zb2": SPLIT,
        # three of four stages, and six of eight: a quarter is empty
        "pp4-dp2-mb1-zero1-1f1b": None, "pp8-mb1-zero1-1f1b": None,
    }  # fmt: skip
    assert {name: six.get(name) for name in expected} == expected
    assert five["pp8-mb1-zero1-1f1b"] == STAGES and "tp4-dp2-mb3-zero1" not in five


def test_steps_of_other_phases_refuse_too(made_plans):
    """Four sequences of a smaller phase beside 64: eight ranks are too many, and so are four stages."""
    phases = [
        {"tokens": number * LENGTH * steps, "tokens_per_step": number * LENGTH, "sequence_length": LENGTH}
        for number, steps in ((4, 3), (64, 10))
    ]
    where = " in steps of 4 sequences, of another phase"
    of = run(dataset={"sequence_length": LENGTH}, train={}, phases=phases)
    found = refused_names(of)
    expected = {
        "dp8-mb1-zero1": f"fewer sequences than data-parallel ranks{where}", "tp2-dp4-mb8-zero1": None,
        "tp2-dp4-mb1-zero1": None, "pp4-dp2-mb1-zero1-1f1b": STAGES + where,
        "pp4-dp2-mb1-zero1-zbv": SPLIT + where, "pp2-tp2": None,
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected
    assert of.sequences_of_steps == (4, 64)


def test_so_many_of_each_search_are_simulated(made_plans):
    """50 over all numbers of nodes, at least eight for each, and eight with a name."""
    of = small()
    for nodes, many in (([1], 50), ([1] * 3, 16), ([1] * 7, 8)):
        assert len(search(of, nodes).ranked[1]) == many
    assert len(search(of, [1], lambda layout, size: True).ranked[1]) == 8


def test_kinds_that_are_not_far_slower_come_first(monkeypatch):
    """The fastest of each kind up to 1.5 times the fastest, by the screening's seconds, then the others."""
    of, given = small(), []
    plan_layouts = searching.plan_layouts

    def note(of: RunToPlan, layouts, *more) -> list[PlannedLayout]:
        given.append(layouts)
        return plan_layouts(of, layouts, *more)

    monkeypatch.setattr(searching, "plan_layouts", note)
    search(of, [2])
    chosen = [
        (one.tensor, one.pipeline, one.context, one.pipeline_schedule, one.pipeline_stages_per_rank)
        for one, _, _ in given[1]
    ]
    seconds = [one.step_seconds for one in plan_layouts(of, given[1], None, False)]
    repeats = [number for number in range(50) if chosen[number] in chosen[:number]]
    first = min(repeats + [number for number in range(1, 50) if seconds[number] < seconds[number - 1]])
    assert first > 3 and seconds[first - 1] <= 1.5 * seconds[0]
    assert seconds[:first] == sorted(seconds[:first]) and seconds[first:] == sorted(seconds[first:])
    assert all(seconds[number] > 1.5 * seconds[0] for number in range(first, 50) if number not in repeats)


def test_the_nearest_needs_least_of_all_that_could_run():
    """Nothing fits into 3 GB: the least is told, whatever it is of."""
    of = small()
    tiny = replace(of, card=of.card.model_copy(update={"given_bytes": 3 * 10**9}))
    found = search(tiny, [1], lambda layout, size: size <= 2 and layout.context == 1)
    assert found.ranked[1] == [] and not found.nearest[1].fits
    refused = found.refused[1]["needs more than 1.0 GB a device"]
    asked = [(one.layout, 1, one.micro_batch) for one in refused]
    peaks = [one.peak_bytes for one in searching.plan_layouts(tiny, asked, None, False)]
    assert found.nearest[1].peak_bytes == pytest.approx(min(peaks)) and min(peaks) < max(peaks)
