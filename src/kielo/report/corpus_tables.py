"""Tables of the corpus: its funnel, what its steps kept and dropped, and two corpora beside each other."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from kielo.report.gather import Gathered
from kielo.report.units import format_bytes

Rows = list[tuple[str, ...]]
_DASH = "–"


def corpus_tables(gathered: Gathered) -> dict[str, Any]:
    """Return the tables of the section `corpus` by their names in the page."""
    funnel = gathered.funnel
    if funnel is None:
        return {}
    masked = Counter[str]()
    for source in funnel.sources:
        masked.update(source.masked)
    bytes_in = sum(source.bytes_in for source in funnel.sources)
    return {
        "funnel_table": funnel_table(gathered),
        "other_languages": [
            (kind, [(said, format_bytes(size), f"{size / (bytes_in or 1):.2%}") for said, size in of.items()])
            for kind, of in funnel.identified.items()
        ],
        "cluster_sizes": [(size, f"{number:,}") for size, number in funnel.cluster_sizes.items()],
        "masked": [(kind.replace("_", " "), f"{number:,}") for kind, number in sorted(masked.items())],
        "border_examples": border_rows(gathered),
    }


def funnel_table(gathered: Gathered) -> tuple[tuple[str, ...], Rows, int]:
    """Return the header, the rows and the number of columns of words. Older funnels count no words."""
    steps = gathered.funnel.steps if gathered.funnel else []
    has_words = any(step.words_left for step in steps)
    header: tuple[str, ...] = ("Step", "Why dropped", "Documents dropped", "Text dropped")
    header += ("Words dropped",) if has_words else ()
    header += ("Documents left", "Text left") + (("Words left",) if has_words else ())
    rows, before = Rows(), None
    for step in steps:
        words = ((f"{step.words:,}",), (f"{step.words_left:,}",)) if has_words else ((), ())
        left = (f"{step.documents_left:,}", format_bytes(step.bytes_left), *words[1])
        is_first, before = step.name != before, step.name
        rows.append((
            step.name if is_first else "", step.reason, f"{step.documents:,}", format_bytes(step.bytes),
            *words[0], *(left if is_first else ("",) * len(left)),
        ))  # fmt: skip
    return header, rows, 2


def border_rows(gathered: Gathered) -> list[tuple[str, Rows]]:
    """Return, for each step, rows of a verdict, a source and the beginning of a text."""
    steps: dict[str, Rows] = defaultdict(list)
    for one in gathered.funnel.examples if gathered.funnel else ():
        steps[one.step].append((f"dropped: {one.reason}" if one.reason else "kept", one.source, one.text))
    return [(step, rows) for step, rows in steps.items() if any(row[0] != "kept" for row in rows)]


def compared_corpora(runs: Sequence[Gathered]) -> Rows:
    """Return rows of a measure and its value in each run: sizes, text left after steps, other languages."""
    if not any(run.funnel for run in runs):
        return []
    rows = [
        ("Text read", *(_count(run, "bytes_in", is_bytes=True) for run in runs)),
        ("Text kept", *(_count(run, "bytes_kept", is_bytes=True) for run in runs)),
        ("Documents read", *(_count(run, "documents_in") for run in runs)),
        ("Documents kept", *(_count(run, "documents_kept") for run in runs)),
        ("Words kept", *(_count(run, "words_kept") for run in runs)),
    ]
    left = [_shares_left(run) for run in runs]
    for step in dict.fromkeys(step for of in left for step in of):
        rows.append((f"Text left after {step}", *(of.get(step, _DASH) for of in left)))
    said = [_languages(run) for run in runs]
    total = sum(said, Counter[str]())
    for language, _ in total.most_common(10):
        rows.append((f"Text dropped as {language}", *(format_bytes(of[language]) for of in said)))
    return rows


def _count(run: Gathered, key: str, is_bytes: bool = False) -> str:
    value = (run.corpus or {}).get(key)
    if value is None:
        return _DASH
    return format_bytes(value) if is_bytes else f"{value:,}"


def _shares_left(run: Gathered) -> dict[str, str]:
    if run.funnel is None:
        return {}
    whole = sum(source.bytes_in for source in run.funnel.sources) or 1
    return {step.name: f"{step.bytes_left / whole:.1%}" for step in run.funnel.steps}


def _languages(run: Gathered) -> Counter[str]:
    found = Counter[str]()
    for of in run.funnel.identified.values() if run.funnel else ():
        found.update(of)
    return found
