"""The funnel's rows, tables and message by hand: what is added up, in which order, and what is left out."""

from collections import Counter

import pytest
import xxhash

from kielo.artifact.stage_counts import FunnelRow
from kielo.corpus.corpus_stage import build_funnel, empty_message, threshold_table
from kielo.corpus.filters import LineLength
from kielo.corpus.funnel_details import border_examples, cluster_sizes, identified_languages
from kielo.corpus.step import Tally, split_document


def tally(name, detail="", examples=(), **sources):
    """A step's tally; sources: name → {"what/reason": number}."""
    counts = {
        source: Counter({tuple(label.split("/", 1)): number for label, number in labels.items()})
        for source, labels in sources.items()
    }
    return Tally(name, detail, counts, list(examples))


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
    many = {"documents_left/": 7, "bytes_left/": 700, "lines/a": 5, "words/": 50, "bytes_at/x": 4}
    for reason, (documents, size) in reasons.items():
        many |= {f"documents/{reason}": documents, f"bytes/{reason}": size}
    left = {"documents_left/": 7, "bytes_left/": 700}
    script = "script", "et or fi"
    half = {label: number // 2 for label, number in many.items()}
    rest = {label: number - half[label] for label, number in many.items()}
    tallies = [
        tally("read", web=left), tally(*script, web=half, book=rest), tally("write", web={"bytes/no": 3}),
        tally("merge cleaned", web=left), tally("pairs", web=left | {"lines/one/two": 2}),
    ]  # fmt: skip
    ordered = [
        row("script (et or fi)", "c", 3, 0, 50, (7, 700)), row("script (et or fi)", "a", 2, 5, 50, (7, 700)),
        row("script (et or fi)", "b", 2, 0, 50, (7, 700)), row("script (et or fi)", "d", 9, 0, 45, (7, 700)),
        row("script (et or fi)", "e", 0, 0, 41, (7, 700)), row("script (et or fi)", "f", 1, 0, 40, (7, 700)),
    ]  # fmt: skip
    first, last = row("read", "", 0, 0, 0, (7, 700)), row("pairs", "one/two", 0, 2, 0, (7, 700))
    assert build_funnel(tallies) == [first, *ordered, last]
    more = many | {"documents/g": 4, "bytes/g": 5, "lines/g": 1, "documents/h": 2, "bytes/h": 6}
    (*shown, others) = build_funnel([tally(*script, web=more)])
    assert shown == ordered and others == row("script (et or fi)", "other reasons", 6, 1, 11, (7, 700))
    seven = build_funnel([tally(*script, web=many | {"bytes/z": 1})])
    assert seven[6] == row("script (et or fi)", "other reasons", 0, 0, 1, (7, 700)) and len(seven) == 7
    assert build_funnel([tally("x")]) == [row("x", "", 0, 0, 0)]


def test_the_table_of_thresholds_adds_up_the_steps():
    """Of all language steps of lines and of documents each; without bytes there is no share."""
    lines = {"bytes_identified/": 300, "bytes_at/0.5": 200, "bytes_at/0.95": 1}
    more = {"bytes_identified/": 100, "bytes_at/0.5": 100}
    read = tally("read", a=lines)
    tallies = [tally("line language", a=lines), read, tally("line language", a=more)]
    assert threshold_table([*tallies, tally("document language")]) == {
        "lines": {"0.5": 0.75, "0.65": 0.0, "0.8": 0.0, "0.9": 0.0, "0.95": 0.0025},
        "documents": {"0.5": 0.0, "0.65": 0.0, "0.8": 0.0, "0.9": 0.0, "0.95": 0.0},
    }
    third = threshold_table([tally("document language", a={"bytes_identified/": 3, "bytes_at/0.9": 1})])
    assert third == {"documents": {"0.5": 0.0, "0.65": 0.0, "0.8": 0.0, "0.9": 0.3333, "0.95": 0.0}}
    assert threshold_table([read]) == {}


def test_tallies_of_sources_and_workers():
    """Counts of 0 stay counts; examples come in the order of the corpus, whichever worker had them."""
    first = [("a", "bad", (0, 9), "z"), ("b", "bad", (1, 0), "x"), ("a", "kept", (0, 1), "k")]
    both = tally("read", examples=first, a={"bytes/x": 1, "lines/x": 0}, b={"bytes/x": 2})
    both.add(tally("read", examples=[("a", "bad", (0, 2), "y")], a={"bytes/x": 10, "words/": 4}))
    assert both.of("a").total() == {("bytes", "x"): 11, ("lines", "x"): 0, ("words", ""): 4}
    assert both.total() == {("bytes", "x"): 13, ("lines", "x"): 0, ("words", ""): 4}
    assert list(both.total()) == [("bytes", "x"), ("lines", "x"), ("words", "")]
    assert both.of("c").total() == {} and list(both.counts) == ["a", "b"]
    assert both.first_examples("a", "bad", 5) == ["y", "z"] and both.first_examples("a", "bad", 1) == ["y"]
    assert both.first_examples("b", "bad", 5) == ["x"] and both.first_examples("b", "kept", 5) == []


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


@pytest.mark.parametrize("workers", [1, 3])
def test_examples_of_a_border_are_the_smallest_hashes(workers):
    """Ten dropped lines and ten first lines that stayed are shown, the same for any number of workers."""
    short, long = [f"no {n}" for n in range(40)] * 2, [f"this line is long enough {n}" for n in range(40)]
    documents = [
        split_document(f"{one}\n{two}\nand another long line", str(n), "web", (0, n), {})
        for n, (one, two) in enumerate(zip(short, long * 2, strict=True))
    ]
    tallies = []
    for rank in range(workers):
        step = LineLength(10)
        assert len(list(step.run(documents[rank::workers]))) == len(documents[rank::workers])
        tallies.append(Tally(step.name, step.detail, step.counts, step.examples))
        assert len(step.examples) == 20
    for other in tallies[1:]:
        tallies[0].add(other)
    found = border_examples(tallies[:1], {"language_rules": {}})
    by_hash = lambda lines: sorted(set(lines), key=lambda line: xxhash.xxh3_64_intdigest(line.encode()))  # noqa: E731
    assert [one.text for one in found] == [*by_hash(long)[:10], *by_hash(short)[:10]]
    assert {(one.step, one.source, one.reason) for one in found} == {
        ("line length", "web", ""), ("line length", "web", "under 10 characters"),
    }  # fmt: skip
    (row,) = build_funnel(tallies[:1])
    assert (row.words, row.words_left) == (80 * 2, 80 * (6 + 4))


def test_examples_are_masked_before_they_are_cut():
    """An address that begins before the end of what is shown does not stay."""
    text = f"{'words ' * 49}mari.maasikas@example.ee and {'more ' * 40}"
    example = ("web", "dropped_example", (7, 0), f"looks like fi\0{text}")
    rules = {"language_rules": {"web": {"languages": ["et"]}}}
    (shown,) = border_examples([tally("line language", examples=[example])], rules)
    assert shown.text.endswith("words mari.m…") and shown.reason == "looks like fi"
    masked = rules | {"mask_personal_data": ["email"]}
    (shown,) = border_examples([tally("line language", examples=[example])], masked)
    assert shown.text.endswith("words [EMAIL…")
    opening = ("Ok " * 4 + "mari.maasikas@example.ee " * 40)[:600]
    assert opening.endswith(" mari.maasikas")  # half of an address, which no pattern finds
    example = ("web", "dropped_example", (7, 0), f"looks like fi\0{opening}")
    (shown,) = border_examples([tally("line language", examples=[example])], masked)
    whole = 12 + 23 * len("[EMAIL] ") + len("mari.maasikas")
    assert shown.text == ("Ok " * 4 + "[EMAIL] " * 23)[: whole - 100] + "…"


def test_other_languages_and_clusters_are_added_up():
    lines = {"bytes/looks like fi": 30, "bytes/not sure": 4, "lines/looks like fi": 1, "bytes_left/": 9}
    many = {f"bytes/looks like {n:02d}": 100 - n for n in range(40)}
    found = identified_languages([
        tally("line language", a=lines, b=lines), tally("document language", a=many),
        tally("script", a=lines),
    ])  # fmt: skip
    assert found["lines"] == {"fi": 60, "not sure": 8} and list(found["documents"])[:2] == ["00", "01"]
    assert found["documents"]["other languages"] == sum(100 - n for n in range(30, 40))
    sizes = [tally("near copies", a={"cluster_size/2": 3, "cluster_size/10-99": 1}, b={"cluster_size/2": 2})]
    assert cluster_sizes(sizes) == {"2": 5, "10-99": 1}
