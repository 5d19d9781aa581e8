"""Details of the funnel: examples on both sides of each step, languages of dropped text, clusters of copies.

All of it comes from the tallies of the steps, and is the same for any number of workers.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from kielo.artifact.json_object import JsonTable
from kielo.artifact.stage_counts import BorderExample
from kielo.corpus.personal_data import MaskPersonalData
from kielo.corpus.step import (
    DROPPED_EXAMPLE,
    KEPT_EXAMPLE,
    MOST_SHOWN,
    SHOWN_CHARACTERS,
    Tally,
    split_verbatim,
)

# Characters of an example. The last characters of an opening that was cut are never shown if data are masked,
# because the beginning of an address or number could be there, and stay.
_SHOWN_MASKED, _UNSURE = 300, 100
_MOST_LANGUAGES, _OTHERS = 30, "other languages"
CLUSTER_SIZE = "cluster_size"


def border_examples(tallies: Sequence[Tally], settings: JsonTable) -> list[BorderExample]:
    """Return up to MOST_SHOWN texts that each step kept, and as many that it dropped, by their hashes."""
    by_step: dict[str, list[Tally]] = defaultdict(list)
    for tally in tallies:
        by_step[tally.name].append(tally)
    mask = _mask(settings)
    return [
        example.model_copy(update={"text": _shown(example.text, mask)})
        for name, own in by_step.items()
        for kind in (KEPT_EXAMPLE, DROPPED_EXAMPLE)
        for example in _of_kind(name, kind, own)
    ]


def _of_kind(step: str, kind: str, tallies: Sequence[Tally]) -> Iterator[BorderExample]:
    found = sorted(
        (digest, text, source)
        for tally in tallies
        for source, of, (digest, _), text in tally.examples
        if of == kind
    )
    shown = set[int]()
    for digest, text, source in found:
        if digest not in shown and len(shown) < MOST_SHOWN:
            shown.add(digest)
            reason, _, opening = text.partition("\0")
            yield BorderExample(step=step, reason=reason, source=source, text=opening)


def _mask(settings: JsonTable) -> MaskPersonalData | None:
    kinds = settings.get("mask_personal_data")
    languages = [code for rule in settings["language_rules"].values() for code in rule["languages"]]
    return MaskPersonalData(tuple(kinds), tuple(dict.fromkeys(languages))) if kinds else None


def _shown(text: str, mask: MaskPersonalData | None) -> str:
    most = _SHOWN_MASKED
    if mask is not None:
        is_cut = len(text) >= SHOWN_CHARACTERS
        document = split_verbatim(text, "", "", (0, 0), {})
        mask.work(document)
        text = document.join()
        if is_cut:  # masks are shorter than what they hide, so that the cut can have moved to the front
            most = min(most, max(0, len(text) - _UNSURE))
    return text if len(text) <= most else f"{text[:most].rstrip()}…"


def identified_languages(tallies: Sequence[Tally]) -> dict[str, dict[str, int]]:
    """Return "lines", "documents" and "pairs" → what the identifier said of dropped text → bytes."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for tally in tallies:
        if not tally.name.endswith(" language"):
            continue
        kind = tally.name.removesuffix(" language") + "s"
        for (what, reason), amount in tally.total().items():
            if what == "bytes" and reason:
                found[kind][reason.removeprefix("looks like ")] += amount
    return {kind: _largest(counts) for kind, counts in found.items() if counts}


def _largest(counts: Counter[str]) -> dict[str, int]:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    largest = dict(ordered[:_MOST_LANGUAGES])
    if rest := sum(amount for _, amount in ordered[_MOST_LANGUAGES:]):
        largest[_OTHERS] = rest
    return largest


def cluster_sizes(tallies: Sequence[Tally]) -> dict[str, int]:
    """Return the sizes of clusters of near copies, smallest first → number of clusters."""
    total = Counter[str]()
    for tally in tallies:
        for (what, size), number in tally.total().items():
            if what == CLUSTER_SIZE:
                total[size] += number
    return {size: total[size] for size in sorted(total, key=lambda size: (len(size), size))}
