"""Filters and steps at the borders of their settings, with all their counts."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash

from kielo.corpus import filters, pipeline
from kielo.corpus.conversations import AlternatingTurns, WholeConversations, read_conversation
from kielo.corpus.corpus_stage import wrapping_advice
from kielo.corpus.duplicates import document_hash
from kielo.corpus.filters import (
    DocumentLength,
    LayOutPairs,
    LineLength,
    Normalise,
    NormaliseSides,
    NotEmpty,
    SideLanguage,
    WholePairs,
)
from kielo.corpus.html_text import page_text
from kielo.corpus.programming_languages import (
    AlphanumericShare,
    GeneratedMarks,
    LineLengths,
    ProgrammingLanguage,
    code_filters,
    programming_language,
)
from kielo.corpus.raw_formats import RawSource
from kielo.corpus.raw_record import BadRecord
from kielo.corpus.step import (
    CorpusStep,
    LanguageRule,
    LineFilter,
    SplitDocument,
    split_document,
    split_verbatim,
)
from kielo.recipe.sections import CodeFilters
from tests.corpus.counted import counted


def document(text="", number=0, source="d", sides=None, **metadata) -> SplitDocument:
    made = split_verbatim(text, f"{source}/{number}", source, (0, number), metadata)
    if sides:
        made.set_sides(sides)
    return made


def run(step: CorpusStep, *documents: SplitDocument) -> tuple[list[str], dict[str, int]]:
    """The texts that are left, and what the step counted of the whole corpus."""
    before = counted(step)
    left = [one.join() for one in step.run(iter(documents))]
    now = {label: count - before.get(label, 0) for label, count in counted(step).items()}
    return left, {label: count for label, count in now.items() if count}


def kept(step: CorpusStep, text: str, **metadata) -> bool:
    return bool(run(step, document(text, **metadata))[0])


class DropMarked(LineFilter):
    """Drops lines for the reason that they begin with."""

    name = "marked"

    def judge(self, document):
        return [line.partition(":")[0] if ":" in line else None for line in document.lines]


def test_a_line_filter_counts_lines_bytes_and_documents():
    """Bytes are with line ends; a document that loses all its lines goes for the reason of most bytes, the
    last by name of two; documents of other sources pass, and each source has its own counts.
    """
    step = DropMarked().for_sources(["a", "b"], "detail")
    documents = [
        document("keep\nx:õ\ny:12", 0, "a"), document("x:1\ny:22", 1, "a"), document("x:11\ny:22", 2, "b"),
        document("x:1", 3, "c"), document("keep", 4, "a"),
    ]  # fmt: skip
    left = [one.lines for one in step.run(iter(documents))]
    assert left == [["keep"], ["x:1"], ["keep"]] and step.detail == "detail"
    assert counted(step) == {
        "lines/x": 3, "bytes/x": 5 + 4 + 5, "lines/y": 3, "bytes/y": 5 + 5 + 5, "documents/y": 2,
        "documents_left/": 3, "bytes_left/": 5 + 4 + 5,
    }  # fmt: skip
    assert counted(step, "b") == {
        "lines/x": 1, "bytes/x": 5, "lines/y": 1, "bytes/y": 5, "documents/y": 1
    }  # fmt: skip
    assert counted(step, "c") == {"documents_left/": 1, "bytes_left/": 4} and counted(step, "d") == {}
    assert counted(step, "a")["bytes_left/"] == 10
    empty = split_document("", "d/0", "a", (0, 0), {})
    assert list(DropMarked().run(iter([empty]))) == [] and not list(DropMarked().run(()))


def test_a_document_filter_counts_what_it_drops():
    """All lines and bytes of the document under its reason."""
    left, counts = run(DocumentLength(5), document("ab\ncd"), document("a\nõ"), document("abcd"))
    assert left == ["ab\ncd"] and counts == {
        "documents/under 5 characters": 2, "lines/under 5 characters": 3, "bytes/under 5 characters": 10,
        "documents_left/": 1, "bytes_left/": 6,
    }  # fmt: skip
    left, counts = run(NotEmpty(), document(" \n\t"), document(" \n a"), document(""))
    assert left == [" \n a"] and counts["documents/empty"] == 2 and counts["lines/empty"] == 3
    assert run(LineLength(3), document("abc\nab\n"))[1] == {
        "lines/under 3 characters": 2, "bytes/under 3 characters": 4, "documents_left/": 1, "bytes_left/": 4
    }  # fmt: skip


def test_a_step_that_runs_again_adds_to_its_counts():
    step = DropMarked()
    for times in (1, 2, 3):
        assert len(list(step.run(iter([document("a\nb:x")])))) == 1
        expected = {
            "lines/b": times,
            "bytes/b": 4 * times,
            "documents_left/": times,
            "bytes_left/": 2 * times,
        }
        assert counted(step).items() >= expected.items()


class CountUp(CorpusStep):
    """Gives `part` + 1 documents to an empty pipeline, and passes on the others but the first."""

    def __init__(self, name, part):
        super().__init__()
        self.name, self.part = name, part

    def run(self, documents):
        return super().run(list(documents) or [document("ab", number) for number in range(self.part + 1)])

    def work(self, document):
        self.count("seen", f"by {self.part}")
        self.count_example("example", document.place, f"{document.id} of {self.part}", 1)
        return self.name == "first" or document.place > (0, 0)


PER_DOCUMENT = {"documents": 1, "bytes": 3, "spaced_words": 1}


def test_counts_of_steps_are_summed_over_parts():
    """Each step is fed by the one before."""

    def tallies_of(part):
        return pipeline.run_steps(
            [CountUp("first", part), CountUp("second", part).for_sources(["d"], "of d")]
        )

    first, second = tallies_of(0)
    assert first.counts["d"]["documents_left", ""] == 1 and second.counts["d"]["documents_left", ""] == 0
    for part in (1, 2):
        for total, tally in zip((first, second), tallies_of(part), strict=True):
            total.add(tally)
    seen = {("seen", "by 0"): 1, ("seen", "by 1"): 2, ("seen", "by 2"): 3, ("example", ""): 6}
    left = lambda number: {(f"{what}_left", ""): n * number for what, n in PER_DOCUMENT.items()}  # noqa: E731
    assert first.counts == {"d": seen | left(6)} and second.counts == {"d": seen | left(3)}
    assert [(one.name, one.detail) for one in (first, second)] == [("first", ""), ("second", "of d")]
    examples = [("d", "example", (0, 0), f"d/0 of {part}") for part in range(3)]
    assert first.examples == second.examples == examples


def test_normal_form_is_counted():
    """Bytes less than before, and documents of which nothing is left."""
    left, counts = run(Normalise(), document(" a\t b \n\n\u200bõ"), document("\n"), document("a"))
    assert left == ["a b\nõ", "a"] and counts == {
        "bytes/white space and control characters": 14 - 7 + 2, "documents/empty": 1,
        "documents_left/": 2, "bytes_left/": 9,
    }  # fmt: skip


def test_a_split_document_counts_bytes_by_line():
    one = split_document("a\r\nõ\u2028b\n", "x", "s", (1, 2), {"k": 1})
    assert (one.lines, one.line_bytes, one.num_bytes) == (["a", "õ", "b"], [2, 3, 2], 7)
    assert (one.id, one.source, one.place, one.metadata, one.sides) == ("x", "s", (1, 2), {"k": 1}, None)
    assert one.words() == [["a"], ["õ"], ["b"]] and one.words() is one.words()
    one.set_lines(["c d"])
    assert one.words() == [["c", "d"]] and one.num_bytes == 4
    one.set_sides(("a\nb", "c"))
    assert one.lines == ["a", "b", "c"] and one.sides == ("a\nb", "c")
    verbatim = split_verbatim("a\r\n\x0cb\n", "x", "s", (1, 2), {"k": 1})
    assert verbatim.lines == ["a\r", "\x0cb", ""] and verbatim.join() == "a\r\n\x0cb\n"
    assert (verbatim.place, verbatim.metadata, verbatim.id) == ((1, 2), {"k": 1}, "x")


def test_code_at_the_borders():
    """A line as long as allowed, lines as long on average, a mark in the tenth line, a share just reached."""
    assert kept(LineLengths(10, 99), "a" * 10) and not kept(LineLengths(10, 99), "a\n" + "a" * 11)
    assert kept(LineLengths(99, 3), "a\nabcde") and not kept(LineLengths(99, 3), "a\nabcdef")
    marks = GeneratedMarks(["Do NOT edit", "made by"])
    assert not kept(marks, "\n" * 9 + "# do not EDIT") and kept(marks, "\n" * 10 + "# do not edit")
    assert run(marks, document("MADE by x, do not edit"))[1]["documents/says 'do not edit'"] == 1
    share = AlphanumericShare(0.25)
    assert (
        kept(share, "a\n---") and not kept(share, "a\n----") and kept(share, "õ1------") and kept(share, "")
    )
    python = ProgrammingLanguage(["python", "c"])
    assert kept(python, "x", programming_language="c") and not kept(python, "x", programming_language="rust")
    assert run(python, document("x"))[1]["documents/is not known"] == 1
    assert run(LineLengths(10, 3), document("a" * 11), document("a" * 4))[1] == {
        "documents/a line of over 10 characters": 1, "lines/a line of over 10 characters": 1,
        "bytes/a line of over 10 characters": 12, "documents/lines of over 3 characters on average": 1,
        "lines/lines of over 3 characters on average": 1, "bytes/lines of over 3 characters on average": 5,
    }  # fmt: skip
    made = code_filters(CodeFilters(max_line_characters=7, max_mean_line_characters=5, generated_marks=["x"]))
    assert [type(one) for one in made] == [LineLengths, GeneratedMarks, AlphanumericShare]
    assert (made[0].max_characters, made[0].max_mean_characters, made[1].marks) == (7, 5, ("x",))
    assert made[2].min_share == 0.25
    assert [one.name for one in code_filters(CodeFilters(languages=["c"]))][0] == "programming language"


def test_programming_languages_by_name_and_extension():
    names = {"a/B.PY": "python", "x.tar.h": "c", ".rs": "rust", "rs": "rust", "python": "python"}
    names |= {"x.txt": None, "": None, "makefile": "makefile", "a.b/readme": None, "c++": "c++", "cxx": "c++"}
    assert {name: programming_language(name) for name in names} == names


def test_messages_and_turns():
    """Both spellings, the first field that is there, and each order of roles that may be."""
    where = "x.jsonl, line 3"
    both = {"messages": [], "conversations": [{"from": "gpt", "value": "a"}, {"from": "tool", "value": "b"}]}
    assert read_conversation(where, both, ("conversations", "messages")) == (
        [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}], None
    )  # fmt: skip
    assert read_conversation(where, both, ("turns", "messages")) == ([], None)
    mixed = [{"role": "human", "content": "a", "from": "gpt", "value": "b"}]
    assert read_conversation(where, {"t": mixed}, ("t",))[0] == [{"role": "user", "content": "a"}]
    with pytest.raises(BadRecord, match="line 3: the field 'a' is missing .* fields are none"):
        read_conversation(where, {}, ("a", "b"))
    with pytest.raises(BadRecord, match="the field 'b' is a dict .*its fields are b, c"):
        read_conversation(where, {"b": {}, "c": 1}, ("a", "b"))
    with pytest.raises(BadRecord, match="message 2: unknown role '7'. Fix: one of system, developer, user"):
        read_conversation(where, {"a": [mixed[0], {"role": 7, "content": ""}]}, ("a",))
    turns = AlternatingTurns()

    def may(*roles):
        return kept(turns, "x", turns=[[role, 0] for role in roles])

    assert may() and may("user") and may("system", "user", "assistant", "user")
    assert may("user", "assistant", "tool", "tool", "assistant", "user", "assistant")
    for wrong in (["assistant"], ["tool"], ["user", "user"], ["user", "system"], ["system", "assistant"],
                  ["user", "tool"], ["user", "assistant", "assistant"], ["system", "system"],
                  ["user", "assistant", "tool", "user"]):  # fmt: skip
        assert not may(*wrong)
    whole = WholeConversations()
    assert kept(whole, "a\nb", turns=[["user", 1], ["assistant", 1]])
    _, counts = run(
        whole,
        document("a\n \nc", turns=[["user", 1], ["assistant", 1], ["assistant", 1]]),
        document("a", turns=[["user", 1]]),
    )
    assert counts["documents/an answer is empty"] == counts["documents/no answer"] == 1


def test_the_same_words_of_other_roles_are_no_duplicate():
    users, systems = ([[role, 1], ["assistant", 1]] for role in ("user", "system"))
    documents = [document("a\nb", turns=one) for one in (users, systems, users)]
    documents += [document("a\nb"), document("a\nb")]
    first, second, third, fourth, fifth = map(document_hash, documents)
    assert (third, fifth) == (first, fourth) and len({first, second, fourth}) == 3


# --- Pairs ---

RULE = LanguageRule(("et",), ("et",), ("Latin",), "", 0.5, 0.7)


def test_pairs_are_whole_and_translated():
    """White space at the ends is no text; sides in normal form are counted."""
    step = WholePairs()
    assert kept(step, "", sides=("a", "b"))
    _, counts = run(
        step, document(sides=("a", " ")), document(sides=("\n", "b")), document(sides=(" a", "a ")),
    )  # fmt: skip
    assert counts["documents/a side is empty"] == 2 and counts["documents/both sides are the same"] == 1
    one = document(sides=(" a \n\n b", "õ\u200b"))
    _, counts = run(NormaliseSides(), one)
    assert one.sides == ("a\nb", "õ") and one.lines == ["a", "b", "õ"]
    assert counts["bytes/white space and control characters"] == 4 + 1 + 3 + 6 - 7


def test_a_side_is_identified_from_30_characters_on(monkeypatch):
    """Of its own text; a best guess of its language is enough."""

    class Spoken:
        def probabilities(self, text):
            return {"et": 0.4, "en": 0.3} if "õ" in text else {"en": 0.9, "et": 0.1}

    monkeypatch.setattr("kielo.corpus.language_identification.load_identifier", lambda name: Spoken())
    for side in (0, 1):
        step = SideLanguage("x", RULE.identifier_codes, RULE.line_threshold, side)
        assert (step.codes, step.threshold, step.side) == (("et",), 0.5, side)

        def of(text, side=side):
            return ("õ" * 40, text) if side else (text, "õ" * 40)

        assert kept(step, "", sides=of("a" * 29)) and not kept(step, "", sides=of("a" * 30))
        assert kept(step, "", sides=of("a" * 30 + "õ")) and kept(step, "", sides=of("õ" * 99))
        sides = [document(sides=of(text)) for text in ("a" * 30, "õ" * 30, "a" * 29)]
        _, counts = run(step, *sides)
        assert counts["documents/looks like en"] == 1 and counts["bytes_identified/"] == 30 + 60


def test_the_layout_follows_from_the_sides():
    """Template and direction are drawn by a hash of both sides: seed 18, template by its lower half, and
    reversed where the upper half is below the share."""
    templates = [
        "{source}={target}",
        "{source_language}>{target_language}: {source}/{target}",
        "{target}<{source}",
    ]
    ways = set()
    for number in range(40):
        sides = (f"en {number}", f"õ {number}\nb")
        drawn = xxhash.xxh3_64_intdigest("\0".join(sides).encode(), seed=18)
        which, is_reversed = drawn % 3, (drawn >> 32) < 0.3 * 2**32
        ways.add((which, is_reversed))
        (one, other), (first, second) = sides, ("English", "Estonian")
        if is_reversed:
            one, other, first, second = other, one, second, first
        expected = [f"{one}={other}", f"{first}>{second}: {one}/{other}", f"{other}<{one}"][which]
        pair = document(sides=sides)
        assert run(LayOutPairs(templates, 0.3, ["English", "Estonian"]), pair)[0] == [expected]
        assert pair.sides is None and pair.lines == expected.split("\n")
    assert len(ways) == 6
    for share, expected in ((0, "a=b"), (1, "b=a")):
        step = LayOutPairs(["{source}={target}"], share, ["x", "y"])
        assert run(step, document(sides=("a", "b")))[0] == [expected]


def test_the_direction_at_its_border(monkeypatch):
    """Of the upper half of a hash, 2^31 values are below a share of a half."""
    for upper, expected in ((2**31 - 1, "b=a"), (2**31, "a=b"), (0, "b=a"), (2**32 - 1, "a=b")):
        hashes = SimpleNamespace(xxh3_64_intdigest=lambda content, seed, upper=upper: (upper << 32) + 6)
        monkeypatch.setattr(filters, "xxhash", hashes)
        step = LayOutPairs(["{source}={target}"], 0.5, ["x", "y"])
        assert run(step, document(sides=("a", "b")))[0] == [expected]
    with pytest.raises(ValueError, match="argument 2 is longer"):
        run(LayOutPairs(["{source}"], 0.5, ["x", "y", "z"]), document(sides=("a", "b")))


# --- Pages, wrapped text, and files of documents ---


def test_pages_by_hand():
    """Lines at blocks; what is skipped ends where it ends, or with what holds it, or with the body."""
    assert page_text("<p>a<br/>b<hr>c</p>d<span>e</span>") == "a\nb\nc\nde"
    assert page_text("<script>x<p>y</p></script>a<nav>b<code>c</nav>d") == "ad"
    assert page_text("<head><title>t<body>a</style>b") == "ab"
    assert page_text("<pre>a</code>b</pre>c") == "c" and page_text("a<svg/>b &lt; c") == "ab < c"
    article = '<div>x<div id="DisplayArea">a<div>b</div>c</div>d<div>e</div></div>'
    assert page_text(article) == "a\nb\nc"
    assert page_text(article.replace("Display", "Other")) == "x\na\nb\nc\nd\ne"
    assert page_text('a<div id="DisplayArea"></div>') == "" and page_text("") == ""
    assert page_text('<p id="DisplayArea">a</p></div></div>b') == "a\nb"


def raw_source(folder: Path, *files: str, **changes) -> RawSource:
    values = {
        "name": "s", "root": str(folder), "files": files, "stamps": (), "kind": "text", "is_cleaned": True,
        "documents": "lines", "text_fields": ("text",), "max_documents": None, "origin": "o",
        "fingerprint": "f",
    }  # fmt: skip
    return RawSource(**values | changes)


def test_wrapped_text_at_the_borders(tmp_path):
    """By hand: the width that 98 of 100 full lines keep to, nine of ten lines over half of it, none over
    twice, twenty lines and one empty line at least, and a width of 40 to 120 characters.
    """

    def advice(lines: list[int], **changes) -> str | None:
        (tmp_path / "a.txt").write_text("".join("a" * size + "\n" for size in lines))
        return wrapping_advice(raw_source(tmp_path, "b.html", "a.txt", **changes))

    usual = [60] * 20 + [5, 0]
    assert f"{tmp_path}/a.txt looks wrapped at 60 characters, so each" in advice(usual)
    assert advice(usual[1:]) is None and advice(usual, documents="paragraphs") is None
    assert advice([60] * 21 + [5]) is None  # no empty line
    for width, is_one in ((39, False), (40, True), (120, True), (121, False)):
        assert (advice([width] * 20 + [5, 0]) is not None) is is_one
    assert (
        advice([60] * 17 + [31, 30, 30, 5, 0]) is not None and advice([60] * 17 + [30] * 3 + [5, 0]) is None
    )
    assert advice([60] * 99 + [120, 5, 0]) is not None and advice([60] * 99 + [121, 5, 0]) is None
    assert "at 61" in advice([60] * 98 + [61, 61, 5, 0]) and "at 60" in advice([60] * 99 + [61, 5, 0])
    # Lines that an empty one follows, or that are empty, are ends of paragraphs.
    assert advice([60, 60, 7, 0] * 10) is not None and advice([60, 7, 0] * 19) is None
    assert advice([60] * 2000 + [0]) is None and advice([60] * 1999 + [0]) is not None
    assert advice([*usual, (1 << 20) + 1]) is not None and advice([(1 << 20) + 1, *usual]) is None
    assert advice([*usual, (1 << 20) + 1, 5]) is not None and advice([*usual, 1 << 20, 5]) is None
    assert wrapping_advice(raw_source(tmp_path, "b.html")) is None
