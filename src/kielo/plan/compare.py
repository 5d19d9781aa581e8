"""Names of the parts of a step and of memory, comparison of planned layouts, and scaling; no torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from operator import attrgetter

from kielo.plan.layer_seconds import BESIDE_COLLECTIVE
from kielo.plan.planned_layout import SHARE, PlannedLayout, plan_layouts
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import Found, search
from kielo.recipe.sections import Phase, Recipe, Train

# Parts of a step and of memory → names in text.
SECONDS = {
    "matrix": "matrix products",
    "attention": "attention",
    "elementwise": "norms and activations",
    "launch": "kernel launches",
    "head": "output head and loss",
    "bubble": "pipeline bubble",
    **{f"{kind}_traffic": f"{kind} traffic" for kind in ("tensor", "context", "pipeline", "data")},
    "optimiser": "optimiser",
    "fixed": "fixed costs",
    "slowest": "slowest device",
}
_SAME = ("weights", "gradients", "optimiser", "activations", "logits", "gathered", "workspace")
BYTES = {name: name for name in _SAME} | {"optimiser": "optimiser state", "gathered": "gathered parameters"}
_LEAST = 0.005  # of a step; smaller differences are added up, and less gain is not worth a sentence
ASSUMED = (
    f"by assumption: a product beside a collective keeps {BESIDE_COLLECTIVE:.0%} of its rate. It was not "
    "measured on a GPU"
)


def parts_of(several: Sequence[Mapping[str, float]], names: Mapping[str, str]) -> list[str]:
    """Return the parts that at least one of `several` has, in the order of `names`."""
    known = dict.fromkeys([*names, *(part for each in several for part in each)])
    return [part for part in known if any(each.get(part, 0.0) > 0 for each in several)]


def decimals(planned: PlannedLayout) -> int:
    """Return the decimals that show four figures of the step's seconds."""
    return max(0, 3 - math.floor(math.log10(planned.step_seconds)))


def seconds_text(planned: PlannedLayout, seconds: float) -> str:
    """Return seconds as text, to the step's fourth figure, or to two figures if they are smaller."""
    own = 1 - math.floor(math.log10(abs(seconds))) if seconds else 0
    return f"{seconds:.{max(decimals(planned), own)}f} s".replace("-", "−")


def gb_text(size: float) -> str:
    return f"{size / 1e9:.1f}"


def count_text(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def listed(texts: Sequence[str], conjunction: str = "and") -> str:
    return f" {conjunction} ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def strong_and_weak(
    run: RunToPlan, nodes: Sequence[int], found: Found
) -> tuple[list[PlannedLayout], list[PlannedLayout]]:
    """Return the fastest layouts `found` on each of `nodes`: (with the run's batch, with a growing batch)."""
    strong = [found.ranked[number][0] for number in nodes if found.ranked[number]]
    first = strong[0].nodes
    weak = []
    for planned in strong:
        grown = RunToPlan.of(_grown(run.recipe, Fraction(planned.nodes, first)), run.model)
        weak += search(grown, [planned.nodes]).ranked[planned.nodes][:1]
    return strong, weak


def with_larger_steps(run: RunToPlan, factor: float) -> RunToPlan | None:
    """Return the run with `factor` times the tokens in each step, None if these are no whole sequences."""
    grown = RunToPlan.of(_grown(run.recipe, Fraction(factor)), run.model)
    is_whole = all(phase.tokens_per_step % phase.sequence_length == 0 for phase in grown.phases)
    return grown if is_whole and all(phase.tokens_per_step for phase in grown.phases) else None


def _grown(recipe: Recipe, factor: Fraction) -> Recipe:
    """Return the recipe with `factor` times the tokens in each step of each phase."""

    def larger(part: Train | Phase) -> Train | Phase:
        tokens = part.tokens_per_step
        return part.model_copy(update={"tokens_per_step": tokens and int(tokens * factor)})

    phases = tuple(larger(phase) for phase in recipe.phases)
    return recipe.model_copy(update={"train": larger(recipe.train), "phases": phases})


def with_overlap(planned: PlannedLayout) -> PlannedLayout | None:
    """Plan collectives in chunks. Return None if this is impossible or hardly shortens the step."""
    layout = planned.layout
    if layout.tensor == 1 or layout.tensor_overlap != "none" or not layout.sequence_parallel:
        return None
    if planned.run.precision == "fp8":  # whose matrices gather at once
        return None
    chunked = layout.model_copy(update={"tensor_overlap": "chunked"})
    layouts = [(chunked, planned.nodes, planned.micro_batch)]
    (changed,) = plan_layouts(planned.run, layouts, planned.phase)
    return changed if changed.step_seconds <= (1 - _LEAST) * planned.step_seconds else None


def overlap_offer(planned: PlannedLayout) -> str | None:
    """Return a sentence on the gain of collectives in chunks, if there is any."""
    changed = with_overlap(planned)
    if changed is None:
        return None
    saved = 1 - changed.step_seconds / planned.step_seconds
    return (
        f'{planned.name}: layout.tensor_overlap = "chunked" would take {saved:.1%} off a step, since its '
        f"collectives then run beside products ({ASSUMED})."
    )


def compare(several: Sequence[PlannedLayout]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return (titles, rows) of a table with a column for each layout, without parts that no layout has."""
    places = max(decimals(planned) for planned in several)

    def seconds(values: Iterable[float]) -> list[str]:
        return [f"{value:.{places}f}" for value in values]

    def sizes(values: Iterable[float]) -> list[str]:
        return [gb_text(value) for value in values]

    lows = zip(
        seconds(one.low_seconds for one in several), seconds(one.high_seconds for one in several), strict=True
    )
    cells = {
        "nodes": [f"{one.nodes:,}" for one in several],
        **{
            f"{SECONDS.get(part, part)}, s": seconds(one.seconds.get(part, 0.0) for one in several)
            for part in parts_of([one.seconds for one in several], SECONDS)
        },
        "step, s": seconds(one.step_seconds for one in several),
        f"{SHARE:.0%} interval, s": [f"{low}–{high}" for low, high in lows],
        "tokens/s": [f"{one.tokens_per_second:,.0f}" for one in several],
        "TFLOP/s a device": [f"{one.tflops_per_device:.1f}" for one in several],
        "MFU": [f"{one.mfu:.1%}" for one in several],
        **{
            f"{BYTES.get(part, part)}, GB": sizes(one.bytes.get(part, 0.0) for one in several)
            for part in parts_of([one.bytes for one in several], BYTES)
        },
        "memory in all, GB": sizes(one.peak_bytes for one in several),
        "of usable, GB": sizes(one.run.usable_bytes for one in several),
        "host memory a node, GB": sizes(one.host_bytes_per_node for one in several),
        "fits": ["yes" if one.fits else "no" for one in several],
    }
    return ("", *(one.name for one in several)), [(title, *each) for title, each in cells.items()]


def verdict(several: Sequence[PlannedLayout]) -> str:
    """Return text on the fastest layout that fits, by how much and why, and the layouts that do not fit."""
    fitting = sorted((one for one in several if one.fits), key=lambda one: -one.tokens_per_second)
    sentences = []
    if len(fitting) > 1:
        sentences.append(_faster(*fitting[:2]))
    elif fitting:
        only, alone = fitting[0], "alone " * (len(several) > 1)
        sentences.append(f"{_called(only, several)} {alone}fits: {only.tokens_per_second:,.0f} tokens/s.")
    missed = [
        f"{_called(one, several)} ({gb_text(need.bytes)} of {gb_text(need.usable)} GB{need.of_host})"
        for one, need in ((one, one.need) for one in several if not one.fits)
    ]
    if missed:
        sentences.append(f"{listed(missed)} {'do' if len(missed) > 1 else 'does'} not fit.")
    return " ".join(sentences)


def differences(planned: PlannedLayout, other: PlannedLayout, scale: float = 1.0) -> dict[str, float]:
    """Return part → seconds of `planned` beyond `other` × scale, largest first."""
    parts = dict.fromkeys([*planned.seconds, *other.seconds])
    found = {part: planned.seconds.get(part, 0.0) - scale * other.seconds.get(part, 0.0) for part in parts}
    return dict(sorted(found.items(), key=lambda each: -abs(each[1])))


def is_comparable(one: PlannedLayout, other: PlannedLayout) -> bool:
    same = attrgetter("nodes", "tokens_per_step", "sequence_length", "run.site.name", "run.model")
    return same(one) == same(other)


def unfit(planned: PlannedLayout) -> str:
    need = planned.need
    return "" if need.fits else f", which does not fit into {gb_text(need.usable)} GB{need.of_host}"


def changed_parts(planned: PlannedLayout, other: PlannedLayout) -> str:
    """Return the seconds of `planned` beyond `other`, largest first, with small parts added up."""
    found, places = differences(planned, other), decimals(planned)
    least = _LEAST * planned.step_seconds
    large = {part: seconds for part, seconds in found.items() if abs(seconds) >= least}
    rest = f"the rest {signed_text(sum(found.values()) - sum(large.values()), places)}"
    return ", ".join([*([_with_seconds(large, places)] if large else []), rest])


def signed_text(seconds: float, places: int) -> str:
    return f"{seconds:+.{places}f} s".replace("-", "−")


def _with_seconds(parts: Mapping[str, float], places: int, of: str = "") -> str:
    texts = (f"{SECONDS.get(part, part)} ({signed_text(each, places)}{of})" for part, each in parts.items())
    return ", ".join(texts)


def _faster(first: PlannedLayout, second: PlannedLayout) -> str:
    """Return by how much `first` is faster, and why. Steps of different size compare by equal tokens."""
    gain = first.tokens_per_second / second.tokens_per_second - 1
    found = differences(first, second, first.tokens_per_step / second.tokens_per_step)
    saved = {part: seconds for part, seconds in found.items() if seconds < 0}
    lost = {part: seconds for part, seconds in found.items() if seconds > _LEAST * first.step_seconds}
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
    differ = len({each.nodes for each in several}) > 1
    return planned.name + f" on {count_text(planned.nodes, 'node')}" * differ
