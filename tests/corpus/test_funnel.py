"""The funnel's rows, tables and message by hand: what is added up, in which order, and what is left out."""

from types import SimpleNamespace

import pytest

from kielo.artifact.funnel import FunnelRow
from kielo.corpus.make_funnel import build_funnel, by_source, empty_message, threshold_table
from kielo.corpus.step import labels_of


def step(name, detail=""):
    return SimpleNamespace(name=name, detail=detail)


def row(name, reason, documents, lines, num_bytes, left=(0, 0)):
    return FunnelRow(
        name=name, reason=reason, documents=documents, lines=lines, bytes=num_bytes,
        documents_left=left[0], bytes_left=left[1],
    )  # fmt: skip


def test_rows_of_the_funnel_by_hand():
    """The largest reason first: by bytes, then documents, then name; six of each step, the others added up;
    a step without a reason has one empty row; steps that only write have none.
    """
    reasons = {"f": (1, 40), "b": (2, 50), "a": (2, 50), "c": (3, 50), "d": (9, 45), "e": (0, 41)}
    many = {"documents_left/": 7, "bytes_left/": 700, "lines/a": 5, "of/web/bytes/a": 50, "source_bytes/x": 4}
    for reason, (documents, size) in reasons.items():
        many |= {f"documents/{reason}": documents, f"bytes/{reason}": size}
    left = {"documents_left/": 7, "bytes_left/": 700}
    steps = [step("read"), step("script", "et or fi"), step("write"), step("merge cleaned"), step("pairs")]
    counts = [left, many, left | {"bytes/no": 3}, left, left | {"lines/one/two": 2}]
    ordered = [
        row("script (et or fi)", "c", 3, 0, 50, (7, 700)), row("script (et or fi)", "a", 2, 5, 50, (7, 700)),
        row("script (et or fi)", "b", 2, 0, 50, (7, 700)), row("script (et or fi)", "d", 9, 0, 45, (7, 700)),
        row("script (et or fi)", "e", 0, 0, 41, (7, 700)), row("script (et or fi)", "f", 1, 0, 40, (7, 700)),
    ]  # fmt: skip
    first, last = row("read", "", 0, 0, 0, (7, 700)), row("pairs", "one/two", 0, 2, 0, (7, 700))
    assert build_funnel(steps, counts) == [first, *ordered, last]
    more = many | {"documents/g": 4, "bytes/g": 5, "lines/g": 1, "documents/h": 2, "bytes/h": 6}
    (*shown, others) = build_funnel([steps[1]], [more])
    assert shown == ordered and others == row("script (et or fi)", "other reasons", 6, 1, 11, (7, 700))
    seven = build_funnel([steps[1]], [many | {"bytes/z": 1}])
    assert seven[6] == row("script (et or fi)", "other reasons", 0, 0, 1, (7, 700)) and len(seven) == 7
    assert build_funnel([step("x")], [{}]) == [row("x", "", 0, 0, 0)]


def test_the_table_of_thresholds_adds_up_the_steps():
    """Of all language steps of lines and of documents each; without bytes there is no share."""
    lines = {"bytes_identified/": 300, "bytes_at/0.5": 200, "bytes_at/0.95": 1}
    steps = [step("line language"), step("read"), step("line language"), step("document language")]
    counts = [lines, lines, {"bytes_identified/": 100, "bytes_at/0.5": 100}, {}]
    assert threshold_table(steps, counts) == {
        "lines": {"0.5": 0.75, "0.65": 0.0, "0.8": 0.0, "0.9": 0.0, "0.95": 0.0025},
        "documents": {"0.5": 0.0, "0.65": 0.0, "0.8": 0.0, "0.9": 0.0, "0.95": 0.0},
    }
    third = threshold_table([step("document language")], [{"bytes_identified/": 3, "bytes_at/0.9": 1}])
    assert third == {"documents": {"0.5": 0.0, "0.65": 0.0, "0.8": 0.0, "0.9": 0.3333, "0.95": 0.0}}
    assert threshold_table([step("read")], [lines]) == {}
    for table in (threshold_table, build_funnel):
        with pytest.raises(ValueError, match="argument 2 is shorter"):
            table(steps, counts[:3])


def test_counts_of_sources():
    """By the labels of sources alone; those of one source are those that begin with its name."""
    labels = {"source_documents/a": 3, "source_bytes/a": 9, "source_bad/b": 1, "bytes/a": 5}
    assert by_source(labels) == {"a": {"documents": 3, "bytes": 9}, "b": {"bad": 1}}
    mixed = {"of/a/bytes/x": 1, "of/ab/bytes/x": 2, "bytes/x": 3, "of/a/bytes_left/": 4}
    assert labels_of("a", mixed) == {"bytes/x": 1, "bytes_left/": 4}


def test_the_message_of_an_empty_corpus_by_hand():
    """Rows that dropped something, be it documents or bytes, each threshold's share, and the advice."""
    rows = [
        row("read", "", 0, 0, 0), row("content", "empty", 2, 0, 0), row("normalise", "white space", 0, 0, 7),
        row("line language", "looks like en", 1234, 3, 56_789),
    ]  # fmt: skip
    table = {"lines": {"0.5": 0.25, "0.65": 0.125}, "documents": {"0.5": 0.0}}
    assert empty_message("source a", rows, table, "Do this").splitlines() == [
        "corpus: nothing is left of source a. What each step dropped:",
        f"  {'content':<28} {'empty':<36}         2 documents              0 bytes",
        f"  {'normalise':<28} {'white space':<36}         0 documents              7 bytes",
        f"  {'line language':<28} {'looks like en':<36}     1,234 documents         56,789 bytes",
        "  share of lines at each language threshold: 0.5: 25.0%  0.65: 12.5%",
        "  share of documents at each language threshold: 0.5: 0.0%",
        "Do this",
    ]
