"""Comparison of planned layouts, of numbers of nodes, and with chunked collectives; no torch."""

from collections.abc import Callable, Mapping, Sequence

from kielo.plan.overlap_seconds import BESIDE_COLLECTIVE
from kielo.plan.part_names import (
    BYTES,
    SECONDS,
    count_text,
    decimals,
    gb_text,
    listed,
    parts_of,
    seconds_text,
    signed_text,
)
from kielo.plan.planned_layout import SHARE, PlannedLayout, plan_layouts
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import Found, search
from kielo.recipe.sections import Phase, Recipe, Train

# Strong and weak scaling of a run over numbers of nodes; no torch.


def strong_and_weak(
    run: RunToPlan, nodes: Sequence[int], found: Found
) -> tuple[list[PlannedLayout], list[PlannedLayout]]:
    """Returns the fastest layouts on each number of nodes: (with the run's batch, with a batch that grows).

    `found` is the result of a search over `nodes`. Numbers of nodes on which nothing runs are left out.
    """
    strong = [found.ranked[number][0] for number in nodes if found.ranked[number]]
    first = strong[0].nodes
    weak = []
    for planned in strong:
        grown = RunToPlan.of(_grown(run.recipe, planned.nodes, first), run.model)
        weak += search(grown, [planned.nodes]).ranked[planned.nodes][:1]
    return strong, weak


def _grown(recipe: Recipe, nodes: int, first: int) -> Recipe:
    """Returns the recipe with nodes / first times the tokens in each step of each phase."""

    def larger(part: Train | Phase) -> Train | Phase:
        tokens = part.tokens_per_step
        return part.model_copy(update={"tokens_per_step": tokens and tokens * nodes // first})

    phases = tuple(larger(phase) for phase in recipe.phases)
    return recipe.model_copy(update={"train": larger(recipe.train), "phases": phases})


# The gain that `layout.tensor_overlap = "chunked"` would bring a planned layout, in words; no torch.


_LEAST = 0.005  # of a step; less is not worth a sentence
ASSUMED = (
    f"by assumption: a product beside a collective keeps {BESIDE_COLLECTIVE:.0%} of its rate. It was not "
    "measured on a GPU"
)


def overlap_offer(planned: PlannedLayout) -> str | None:
    """Returns a sentence where collectives in chunks would make the steps of `planned` shorter, by plan."""
    layout = planned.layout
    if layout.tensor == 1 or layout.tensor_overlap != "none" or not layout.sequence_parallel:
        return None
    if planned.run.precision == "fp8":  # whose matrices gather at once
        return None
    chunked = layout.model_copy(update={"tensor_overlap": "chunked"})
    layouts = [(chunked, planned.nodes, planned.micro_batch)]
    (changed,) = plan_layouts(planned.run, layouts, planned.phase)
    saved = 1 - changed.step_seconds / planned.step_seconds
    if saved < _LEAST:
        return None
    return (
        f'{planned.name}: layout.tensor_overlap = "chunked" would take {saved:.1%} off a step, since its '
        f"collectives then run beside products ({ASSUMED})."
    )


# Comparison of planned layouts: a table, a verdict, and the parts where one is better or worse; no torch.


_NAMED_SHARE = 0.005  # of a step; smaller differences between layouts are added up


def compare(several: Sequence[PlannedLayout]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns (titles, rows) of a table with a column for each layout, without parts that no layout has."""
    places = max(decimals(planned) for planned in several)

    def row(title: str, cell: Callable[[PlannedLayout], str]) -> tuple[str, ...]:
        return (title, *(cell(planned) for planned in several))

    def seconds(number: float) -> str:
        return f"{number:.{places}f}"

    rows = [row("nodes", lambda planned: f"{planned.nodes:,}")]
    rows += [
        row(
            f"{SECONDS.get(part, part)}, s",
            lambda planned, part=part: seconds(planned.seconds.get(part, 0.0)),
        )
        for part in parts_of([planned.seconds for planned in several], SECONDS)
    ]
    rows += [
        row("step, s", lambda planned: seconds(planned.step_seconds)),
        row(
            f"{SHARE:.0%} interval, s",
            lambda planned: f"{seconds(planned.low_seconds)}–{seconds(planned.high_seconds)}",
        ),
        row("tokens/s", lambda planned: f"{planned.tokens_per_second:,.0f}"),
        row("TFLOP/s a device", lambda planned: f"{planned.tflops_per_device:.1f}"),
        row("MFU", lambda planned: f"{planned.mfu:.1%}"),
    ]
    rows += [
        row(f"{BYTES.get(part, part)}, GB", lambda planned, part=part: gb_text(planned.bytes.get(part, 0.0)))
        for part in parts_of([planned.bytes for planned in several], BYTES)
    ]
    rows += [
        row("memory in all, GB", lambda planned: gb_text(planned.peak_bytes)),
        row("of usable, GB", lambda planned: gb_text(planned.run.usable_bytes)),
        row("host memory a node, GB", lambda planned: gb_text(planned.host_bytes_per_node)),
        row("fits", lambda planned: "yes" if planned.fits else "no"),
    ]
    return ("", *(planned.name for planned in several)), rows


def verdict(several: Sequence[PlannedLayout]) -> str:
    """Names the fastest layout that fits, by how much and why, and the layouts that do not fit."""
    fitting = sorted(
        (planned for planned in several if planned.fits), key=lambda planned: -planned.tokens_per_second
    )
    sentences = []
    if len(fitting) > 1:
        sentences.append(_faster(*fitting[:2]))
    elif fitting:
        only, alone = fitting[0], "alone " * (len(several) > 1)
        sentences.append(f"{_called(only, several)} {alone}fits: {only.tokens_per_second:,.0f} tokens/s.")
    missed = [planned for planned in several if not planned.fits]
    if missed:
        lacks = [
            f"{_called(planned, several)} ({gb_text(planned.need.bytes)} of "
            f"{gb_text(planned.need.usable)} GB{planned.need.of_host})"
            for planned in missed
        ]
        sentences.append(f"{listed(lacks, 'and')} {'do' if len(missed) > 1 else 'does'} not fit.")
    return " ".join(sentences)


def differences(planned: PlannedLayout, other: PlannedLayout, scale: float = 1.0) -> dict[str, float]:
    """Returns part → seconds that `planned` takes more than `other` (× scale), largest first.

    They add up to the difference of the steps.
    """
    parts = dict.fromkeys([*planned.seconds, *other.seconds])
    found = {part: planned.seconds.get(part, 0.0) - scale * other.seconds.get(part, 0.0) for part in parts}
    return dict(sorted(found.items(), key=lambda each: -abs(each[1])))


def is_comparable(one: PlannedLayout, other: PlannedLayout) -> bool:
    return (one.nodes, one.tokens_per_step, one.sequence_length, one.run.site.name, one.run.model) == (
        other.nodes, other.tokens_per_step, other.sequence_length, other.run.site.name, other.run.model
    )  # fmt: skip


def against(planned: PlannedLayout, other: PlannedLayout) -> str:
    """Says where it is better and worse than `other`; the differences add up to that of the steps."""
    gain = planned.tokens_per_second / other.tokens_per_second - 1
    speed = (
        f"{abs(gain):.1%} {'faster' if gain >= 0 else 'slower'}"
        if gain < 1
        else f"{1 + gain:.1f} times as fast"
    )
    own, others = (seconds_text(planned, each.step_seconds) for each in (planned, other))
    text = f"Against {other.name} it is {speed} ({own} instead of {others})"
    less = planned.peak_bytes - other.peak_bytes
    memory = f"It takes {gb_text(abs(less))} GB {'less' if less < 0 else 'more'}{unfit(other)}."
    return f"{text}: {_named_differences(planned, other)}. {memory}"


def unfit(planned: PlannedLayout) -> str:
    need = planned.need
    return "" if need.fits else f", which does not fit into {gb_text(need.usable)} GB{need.of_host}"


def _named_differences(planned: PlannedLayout, other: PlannedLayout) -> str:
    """Returns "better in pipeline bubble (−1.20 s)" and so on; small differences are added up."""
    found, places = differences(planned, other), decimals(planned)
    large = {
        part: seconds
        for part, seconds in found.items()
        if abs(seconds) >= _NAMED_SHARE * planned.step_seconds
    }
    texts = []
    for text, sign in (("better in", -1), ("worse in", 1)):
        some = {part: seconds for part, seconds in large.items() if seconds * sign > 0}
        if some:
            texts.append(f"{text} {_with_seconds(some, places)}")
    rest = sum(found.values()) - sum(large.values())
    return "; ".join([*texts, f"the rest {signed_text(rest, places)}"])


def _with_seconds(parts: Mapping[str, float], places: int, of: str = "") -> str:
    return ", ".join(
        f"{SECONDS.get(part, part)} ({signed_text(seconds, places)}{of})" for part, seconds in parts.items()
    )


def _faster(first: PlannedLayout, second: PlannedLayout) -> str:
    """Says how much faster `first` is and why; compares steps of different size by equal tokens."""
    gain = first.tokens_per_second / second.tokens_per_second - 1
    found = differences(first, second, first.tokens_per_step / second.tokens_per_step)
    saved = {part: seconds for part, seconds in found.items() if seconds < 0}
    lost = {part: seconds for part, seconds in found.items() if seconds > _NAMED_SHARE * first.step_seconds}
    # A second reason is named if it is at least half of the first.
    reasons = {part: seconds for part, seconds in saved.items() if seconds <= min(saved.values()) / 2}
    both, places = [first, second], decimals(first)
    speed = f"{gain:.1%} faster than" if gain < 1 else f"{1 + gain:.1f} times as fast as"
    text = (
        f"{_called(first, both)} is {speed} {_called(second, both)} "
        f"({first.tokens_per_second:,.0f} tokens/s against {second.tokens_per_second:,.0f})"
    )
    if reasons:
        text += f", mostly by {_with_seconds(dict(list(reasons.items())[:2]), places, ' a step')}"
    if lost:
        text += f", in spite of {_with_seconds(dict(list(lost.items())[:1]), places)}"
    return f"{text}."


def _called(planned: PlannedLayout, several: Sequence[PlannedLayout]) -> str:
    """Returns the layout's name, with its nodes if they differ."""
    return planned.name + (
        f" on {count_text(planned.nodes, 'node')}" if len({each.nodes for each in several}) > 1 else ""
    )
