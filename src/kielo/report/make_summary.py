"""The table that ends a run: summary -> the terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kielo.artifact.scores import BASELINES, Accuracy, ParitySummary, Summary
from kielo.recipe.amounts import format_seconds
from kielo.report.units import HIDDEN_TOKENS, format_bytes, percent, three
from kielo.resolve.overview import amount

NAMES = {"unigram": "token unigram", "xz": "xz -9", "ngram": "byte n-gram"}


def print_summary(summary: Summary, console: Console | None = None) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary_rows(summary):
        table.add_row(name, Text(value))  # a path with brackets is no markup
    (console or Console()).print(table)


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    bits, corpus = summary.bits_per_byte, summary.corpus
    kept = "–"
    if corpus.bytes_in and corpus.bytes_kept is not None:
        kept = (
            f"{format_bytes(corpus.bytes_kept)} of {format_bytes(corpus.bytes_in)}, "
            f"{corpus.documents_kept:,} of {corpus.documents_in:,} documents"
        )
    rows = [("text kept", kept)]
    if summary.parameters and summary.tokens:
        size = f"{amount(summary.parameters)} parameters, trained on {amount(summary.tokens)} tokens"
        rows.append(("model", size))
    speed = summary.tokens_per_second
    rows.append(("training speed", f"{speed:,.0f} tokens per second" if speed else "–"))
    if summary.masked_tokens:
        rows += _masked_rows(summary.masked_tokens)
    if not summary.masked_tokens or bits.model is not None:
        rows.append(("held-out bits per byte", three(bits.model)))
        for name in BASELINES:
            value = getattr(bits, name)
            said = ""
            if bits.model is not None and value is not None:
                said = "  (beaten)" if bits.model < value else "  (not beaten)"
            rows.append((f"  {NAMES[name]}", three(value) + said))
    if not summary.masked_tokens:
        rows.append(("parity with Hugging Face", _parity(summary.parity)))
    rows.append(("exported model", summary.export or "–"))
    seconds = [stage.seconds for stage in summary.stages.values()]
    skipped = sum(stage.skipped for stage in summary.stages.values())
    done = f" ({skipped} of {len(seconds)} stages were already done)" if skipped else ""
    rows.append(("time", format_seconds(sum(seconds)) + done))
    rows.append(("Kielo", summary.kielo_version))
    return rows


def _masked_rows(accuracy: Accuracy) -> list[tuple[str, str]]:
    """Return the lines of hidden tokens, for which bits per byte and parity are not defined."""
    rows = [("hidden tokens predicted", percent(accuracy.model))]
    for name, share in accuracy.baselines().items():
        verdict = "beaten" if accuracy.model > share else "not beaten"
        rows.append((f"  {HIDDEN_TOKENS[name]}", f"{percent(share)}  ({verdict})"))
    return rows


def _parity(parity: ParitySummary) -> str:
    if parity.max_relative_loss_difference is None:
        return "–"
    verdict = "passed" if parity.passed else "FAILED"
    return (
        f"{verdict}: largest relative loss difference {parity.max_relative_loss_difference:.1e} "
        f"over {parity.steps} steps"
    )


def language_row(summary: Summary | None) -> tuple[str, str, str]:
    """Return (text kept, score, time) of a run of several languages, or dashes without a summary."""
    if summary is None:
        return "–", "–", "–"
    kept, bits, masked = summary.corpus.bytes_kept, summary.bits_per_byte.model, summary.masked_tokens
    score = "–" if bits is None else f"{bits:.3f} bits per byte"
    if masked:
        score = f"{percent(masked.model)} of hidden tokens"
    seconds = sum(stage.seconds for stage in summary.stages.values())
    return format_bytes(kept) if kept else "–", score, format_seconds(seconds)
