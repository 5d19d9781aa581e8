"""The funnel: what each step dropped and why, what was left, and the message if nothing was.

The steps' counts → rows for people (`artifact/funnel.py`).
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from kielo.artifact.funnel import FunnelRow
from kielo.corpus.filters import SCRIPT_EXAMPLE, SCRIPT_LINES
from kielo.corpus.language_identification import THRESHOLDS
from kielo.corpus.raw_formats import RawSource
from kielo.corpus.step import SEPARATOR, CorpusStep, labels_of

# Reasons shown for one step; the smaller ones are added up.
MAX_REASONS = 6
OTHERS = "other reasons"
NOT_SHOWN = ("write cleaned", "merge cleaned", "write", "lay out pairs")
_OF_C1 = ("c1_characters", "c1_documents", "c1_kept_characters", "c1_kept_documents")


def build_funnel(steps: Sequence[CorpusStep], counts: Sequence[dict[str, int]]) -> list[FunnelRow]:
    """Returns rows in the order of the steps, each step's largest reason first; at least one row a step."""
    rows: list[FunnelRow] = []
    for step, labels in zip(steps, counts, strict=True):
        if step.name in NOT_SHOWN:
            continue
        left = {
            "documents_left": labels.get("documents_left/", 0),
            "bytes_left": labels.get("bytes_left/", 0),
        }
        for reason, dropped in _largest_reasons(labels).items():
            name = f"{step.name} ({step.detail})" if step.detail else step.name
            rows.append(FunnelRow(name=name, reason=reason, **dropped, **left))
    return rows


def threshold_table(steps: Sequence[CorpusStep], counts: Sequence[dict[str, int]]) -> dict[str, Any]:
    """Returns the shares of bytes that reached each threshold: {"lines": {"0.5": share, …}, "documents": …}.

    Shares are of the lines that reached their language step, and of the documents (each with all its bytes)
    that reached theirs.
    """
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for step, labels in zip(steps, counts, strict=True):
        if step.name in ("line language", "document language"):
            sums[step.name.split()[0] + "s"].update(labels)
    table = {}
    for kind, labels in sums.items():
        total = labels["bytes_identified/"]
        table[kind] = {
            str(threshold): round(labels[f"bytes_at/{threshold}"] / total, 4) if total else 0.0
            for threshold in THRESHOLDS
        }
    return table


def by_source(labels: dict[str, int]) -> dict[str, dict[str, int]]:
    """Returns source name -> {"documents", "bytes"}; for the reader also {"bad", "damaged_bytes"}."""
    sources: dict[str, dict[str, int]] = defaultdict(dict)
    for label, amount in labels.items():
        what, _, name = label.partition(SEPARATOR)
        if what.startswith("source_"):
            sources[name][what.removeprefix("source_")] = amount
    return dict(sources)


def source_report(
    raw: RawSource, source: dict[str, Any], steps: Sequence[CorpusStep], counts: Sequence[dict[str, int]]
) -> Iterator[str]:
    """Yields what became of a source, for the last screen: its files, and its documents by reason."""
    own = [labels_of(raw.name, labels) for labels in counts]
    dropped: Counter[str] = Counter()
    for step, labels in zip(steps, own, strict=True):
        for label, amount in labels.items():
            if amount and label.startswith(f"documents{SEPARATOR}"):
                dropped[f"{step.name}, {label.partition(SEPARATOR)[2]}".replace("read, ", "")] += amount
    told = "; ".join(f"{amount:,} {reason}" for reason, amount in dropped.most_common())
    files = f"{len(raw.files):,} files read" + f", {len(raw.unread):,} not read" * bool(raw.unread)
    yield (
        f"{raw.name}: {files}; {source['documents_in']:,} documents in, {source['documents_kept']:,} kept"
        + f"; dropped: {told}" * bool(told)
    )
    c1 = Counter[str]()
    for labels in own:
        c1.update({name: labels.get(f"{name}{SEPARATOR}", 0) for name in _OF_C1})
    for what, became in (
        ("c1", "became the letters and signs of windows-1252, or went where it has none: the text was taken"),
        ("c1_kept", "stay, for nothing is cleaned there: the text was probably taken"),
    ):
        if c1[f"{what}_characters"]:
            yield (
                f"{raw.name}: {c1[f'{what}_characters']:,} controls U+0080 to U+009F in "
                f"{c1[f'{what}_documents']:,} documents {became} for Latin-1 before"
            )
    yield from _examples_of_scripts(raw.name, own)


def _examples_of_scripts(name: str, counts: Sequence[dict[str, int]]) -> Iterator[str]:
    """Yields the first lines with letters of other scripts, of those dropped and of those kept."""
    found = sorted(
        json.loads(label.partition(SEPARATOR)[2])
        for labels in counts
        for label in labels
        if label.startswith(f"{SCRIPT_EXAMPLE}{SEPARATOR}")
    )
    for what in ("dropped", "kept"):
        number = sum(labels.get(f"{SCRIPT_LINES}{SEPARATOR}{what}", 0) for labels in counts)
        lines = [text for _, is_of, text in found if is_of == what][:2]
        if number:
            yield f"{name}: {number:,} lines with letters of another script {what}, e.g. {' | '.join(lines)}"


def empty_message(what: str, rows: Sequence[FunnelRow], table: dict[str, Any], advice: str) -> str:
    """Returns why nothing was left and what to change: the funnel, and the share kept at each threshold."""
    lines = [f"corpus: nothing is left of {what}. What each step dropped:"]
    lines += [
        f"  {row.name:<28} {row.reason:<36} {row.documents:>9,} documents {row.bytes:>14,} bytes"
        for row in rows
        if row.bytes or row.documents
    ]
    for kind, shares in table.items():
        lines.append(
            f"  share of {kind} at each language threshold: "
            + "  ".join(f"{t}: {s:.1%}" for t, s in shares.items())
        )
    lines.append(advice)
    return "\n".join(lines)


def _largest_reasons(labels: dict[str, int]) -> dict[str, dict[str, int]]:
    dropped: dict[str, Counter[str]] = defaultdict(Counter)
    for label, amount in labels.items():
        what, _, reason = label.partition(SEPARATOR)
        if what in ("documents", "lines", "bytes"):
            dropped[reason][what] += amount
    order = sorted(
        dropped, key=lambda reason: (-dropped[reason]["bytes"], -dropped[reason]["documents"], reason)
    )
    shown = {reason: dropped[reason] for reason in order[:MAX_REASONS]}
    if rest := order[MAX_REASONS:]:
        shown[OTHERS] = sum((dropped[reason] for reason in rest), Counter())
    shown = shown or {"": Counter()}
    return {
        reason: {"documents": count["documents"], "lines": count["lines"], "bytes": count["bytes"]}
        for reason, count in shown.items()
    }
