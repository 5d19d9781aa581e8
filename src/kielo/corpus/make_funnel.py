"""The funnel: what each step dropped and why, what was left, and the message if nothing was.

The steps' counts → rows for people (`artifact/stage_counts.py`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from kielo.artifact.json_object import JsonTable
from kielo.artifact.stage_counts import FunnelRow, FunnelSource
from kielo.corpus.filters import FOREIGN_DROPPED, FOREIGN_KEPT, NUM_EXAMPLES
from kielo.corpus.language_identification import THRESHOLDS
from kielo.corpus.raw_formats import RawSource
from kielo.corpus.step import Tally

# Reasons shown for one step; the smaller ones are added up.
MAX_REASONS = 6
OTHERS = "other reasons"
NOT_SHOWN = ("write cleaned", "merge cleaned", "write", "lay out pairs")


def build_funnel(tallies: Sequence[Tally]) -> list[FunnelRow]:
    """Return rows in the order of the steps, each step's largest reason first; at least one row a step."""
    rows: list[FunnelRow] = []
    for tally in tallies:
        if tally.name in NOT_SHOWN:
            continue
        counts = tally.total()
        left = {what: counts[what, ""] for what in ("documents_left", "bytes_left")}
        for reason, dropped in _largest_reasons(counts).items():
            name = f"{tally.name} ({tally.detail})" if tally.detail else tally.name
            rows.append(FunnelRow(name=name, reason=reason, **dropped, **left))
    return rows


def threshold_table(tallies: Sequence[Tally]) -> JsonTable:
    """Return the shares of bytes that reached each threshold: {"lines": {"0.5": share, …}, "documents": …}.

    Shares are of the lines that reached their language step, and of the documents (each with all its bytes)
    that reached theirs.
    """
    sums: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for tally in tallies:
        if tally.name in ("line language", "document language"):
            sums[tally.name.split()[0] + "s"].update(tally.total())
    table = {}
    for kind, counts in sums.items():
        total = counts["bytes_identified", ""]
        table[kind] = {
            str(threshold): round(counts["bytes_at", str(threshold)] / total, 4) if total else 0.0
            for threshold in THRESHOLDS
        }
    return table


def source_report(raw: RawSource, source: FunnelSource, tallies: Sequence[Tally]) -> Iterator[str]:
    """Yield what became of a source, for the last screen: its files, and its documents by reason."""
    own = [tally.of(raw.name) for tally in tallies]
    total, dropped = Counter[tuple[str, str]](), Counter[str]()
    for tally in own:
        total.update(tally.total())
        # Sorted, since the worker that was first decides the order in which reasons were counted.
        for (what, reason), amount in sorted(tally.total().items()):
            if amount and what == "documents":
                dropped[f"{tally.name}, {reason}".replace("read, ", "")] += amount
    told = "; ".join(f"{amount:,} {reason}" for reason, amount in dropped.most_common())
    files = f"{len(raw.files):,} files read" + f", {len(raw.unread):,} not read" * bool(raw.unread)
    yield (
        f"{raw.name}: {files}; {source.documents_in:,} documents in, {source.documents_kept:,} kept"
        + f"; dropped: {told}" * bool(told)
    )
    for what, became in (
        ("c1", "became the letters and signs of windows-1252, or went where it has none: the text was taken"),
        ("c1_kept", "stay, for nothing is cleaned there: the text was probably taken"),
    ):
        if total[f"{what}_characters", ""]:
            yield (
                f"{raw.name}: {total[f'{what}_characters', '']:,} controls U+0080 to U+009F in "
                f"{total[f'{what}_documents', '']:,} documents {became} for Latin-1 before"
            )
    for kind, became in ((FOREIGN_DROPPED, "dropped"), (FOREIGN_KEPT, "kept")):
        if number := total[kind, ""]:
            lines = [line for tally in own for line in tally.first_examples(raw.name, kind, NUM_EXAMPLES)]
            yield (
                f"{raw.name}: {number:,} lines with letters of another script {became}, "
                f"e.g. {' | '.join(lines)}"
            )


def empty_message(what: str, rows: Sequence[FunnelRow], table: JsonTable, advice: str) -> str:
    """Return why nothing was left and what to change: the funnel, and the share kept at each threshold."""
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


def _largest_reasons(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    dropped: dict[str, Counter[str]] = defaultdict(Counter)
    for (what, reason), amount in counts.items():
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
