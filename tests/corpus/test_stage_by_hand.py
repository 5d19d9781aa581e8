"""The corpus stage around its steps: bad shares, messages, settings and the order of steps, by hand."""

import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kielo.artifact.manifest import write_stage
from kielo.artifact.stage_counts import Funnel, FunnelSource
from kielo.artifact.stage_json import read_json
from kielo.corpus import corpus_stage as corpus_run
from kielo.corpus import input_files
from kielo.corpus.corpus_stage import run_corpus
from kielo.corpus.duplicates import DocumentDuplicates, LineDuplicates
from kielo.corpus.pipeline import ReadPart, SplitAgain, first_pass, second_pass
from kielo.corpus.raw_formats import RawSource
from kielo.corpus.step import (
    Tally,
    effective_settings,
    language_rule,
    language_rules,
    text_fields,
)
from kielo.recipe.cards import language
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Recipe, Source
from tests.corpus.texts import ENGLISH, ESTONIAN, estonian_document

PAIR = {"kind": "parallel", "language": ["en", "et"]}


def read_of(bad: int, records: int, damaged: int = 0, size: int = 1000) -> FunnelSource:
    return FunnelSource(
        name="a", origin="", files=1, documents_in=records, bytes_in=0, bad_records=bad,
        damaged_file_bytes=damaged, file_bytes=size, documents_kept=0, bytes_kept=0,
        bad_examples=["a.txt, line 1: x", "a.txt, line 2: y"],
    )  # fmt: skip


@pytest.mark.parametrize(
    "share, bad, records, is_taken",
    [
        (0.01, 1, 9, False), (0.01, 1, 10, True), (0.01, 2, 199, False), (0.01, 2, 200, True),
        (0, 0, 1, True),
        (0, 1, 1000, False), (1e-9, 1, 10, True), (0.5, 4, 9, True), (0.5, 5, 9, False), (1, 8, 9, True),
        (1, 9, 9, False), (1, 1, 1, False), (0.01, 0, 3, True),
        # Binary products a little below and above the whole number: 28.999…, 7.000…1.
        (0.29, 28, 100, True), (0.29, 29, 100, True), (0.29, 30, 100, False), (0.07, 7, 100, True),
        (0.07, 8, 100, False), (0.57, 57, 100, True), (0.57, 58, 100, False),
    ],
)  # fmt: skip
def test_so_many_bad_records_are_passed_over(share, bad, records, is_taken):
    """That share of a source's records, rounded down; one of ten or more unless none may be; never all."""
    if is_taken:
        assert corpus_run.refuse_bad_sources([read_of(bad, records)], share) is None
        return
    with pytest.raises(KieloError) as refusal:
        corpus_run.refuse_bad_sources([read_of(0, 9), read_of(bad, records)], share)
    assert f"corpus.sources, a: {bad:,} of {records:,} records that cannot be read" in str(refusal.value)
    assert f"max_bad_share = {share:g} allows" in str(refusal.value)
    assert str(refusal.value).endswith("The first:\n  a.txt, line 1: x\n  a.txt, line 2: y")


def test_damaged_files_count_with_their_bytes():
    """Up to the share of the source's bytes."""
    assert corpus_run.refuse_bad_sources([read_of(1, 100, 10)], 0.01) is None
    told = "1 of 100 records .*1.00%., with damaged files of 11 of 1,000 bytes. .* allows 1, and"
    with pytest.raises(KieloError, match=told):
        corpus_run.refuse_bad_sources([read_of(1, 100, 11)], 0.01)
    assert corpus_run.refuse_bad_sources([read_of(1, 100, 29, 100)], 0.29) is None
    with pytest.raises(KieloError, match="damaged files of 30 of 100 bytes. .* allows 29, and"):
        corpus_run.refuse_bad_sources([read_of(1, 100, 30, 100)], 0.29)
    assert corpus_run.bad_records_in_words(read_of(1, 3)) == "a: 1 of 3 records that cannot be read (33.33%)"


def run(folder: Path, *sources: dict, **corpus):
    recipe = Recipe(name="t", language="et", corpus=Corpus(sources=list(sources), **{"workers": 1} | corpus))
    return run_corpus(recipe, folder / "corpus", folder / "raw")


def write(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_what_a_run_says_and_counts(tmp_path, capsys):
    """Line by line: what is cleaned, passed over and kept; the manifest's counts add up the sources'."""
    lines = [estonian_document(number).replace("\n", " ") for number in range(12)]
    a = {"name": "a", "path": write(tmp_path / "a.txt", [*lines, "\x00", "Lühike"])}
    path = Path(a["path"])
    path.write_bytes(path.read_bytes() + b"\xf5\n")
    page = {"name": "b", "path": write(tmp_path / "b.jsonl", ['{"text": "jõgi voolas"}']), "clean": False}
    made = run(tmp_path, a, page)
    kept, size = sum(len(line.encode()) + 1 for line in lines), path.stat().st_size
    described = [
        {
            "name": "a", "origin": a["path"], "files": 1, "files_not_read": 0, "file_bytes": size,
            "documents_in": 15,
            "bytes_in": size - 2, "bad_records": 1, "damaged_file_bytes": 0,
            "bad_examples": ["a.txt, line 15: invalid UTF-8 (byte 0xf5); convert the file"],
            "documents_kept": 12, "bytes_kept": kept, "repaired_lines": 0, "masked": {}, "mended": {},
        },
        {
            "name": "b", "origin": page["path"], "files": 1, "files_not_read": 0, "file_bytes": 25,
            "documents_in": 1,
            "bytes_in": 13, "bad_records": 0, "damaged_file_bytes": 0, "bad_examples": [],
            "documents_kept": 1, "bytes_kept": 13, "repaired_lines": 0, "masked": {}, "mended": {},
        },
    ]  # fmt: skip
    found = [dict(one) for one in made.counts["sources"]]
    assert found[0]["bad_examples"][0].startswith("a.txt, line 15: invalid UTF-8 (byte 0xf5")
    found[0]["bad_examples"] = described[0]["bad_examples"]
    assert found == described
    assert (made.kind, made.version) == ("corpus", 3)  # another number would clean all text again
    words = sum(len(line.replace("(", "").split()) - 3 for line in lines) + 2  # less the three numbers
    assert {key: made.counts[key] for key in made.counts if key != "sources"} == {
        "bytes_in": size - 2 + 13, "documents_in": 16, "bytes_kept": kept + 13, "documents_kept": 13,
        "words_kept": words,
    }  # fmt: skip
    first, second, *of_sources, third = capsys.readouterr().err.splitlines()
    assert first == "corpus: cleaning 2 files with 1 workers"
    assert second.startswith(
        "corpus: passed over a: 1 of 15 records that cannot be read (6.67%); the first: a.txt"
    )
    assert of_sources == [
        "corpus: a: 1 files read. 15 documents in, 12 kept. Dropped: 1 not UTF-8; 1 normalise, empty; "
        "1 line length, under 10 characters",
        "corpus: b: 1 files read. 1 documents in, 1 kept",
    ]
    megabytes = f"{(kept + 13) / 1e6:.2f} of {(size + 11) / 1e6:.2f} MB"
    assert third == f"corpus: kept 13 of 16 documents, {megabytes}"
    assert not (tmp_path / "corpus" / "cleaned").exists()
    funnel = read_json(tmp_path / "corpus", Funnel)
    assert funnel.threshold_table["lines"]["0.5"] > 0 and funnel.sources[1].bytes_kept == 13
    # Nothing to do, unless no record may be bad.
    assert run(tmp_path, a, page) == made and capsys.readouterr().err == ""
    with pytest.raises(KieloError, match="allows 0"):
        run(tmp_path, a, page, max_bad_share=0)
    asked = Recipe(name="t", language="et", corpus=Corpus(sources=[page], workers=1))
    assert run_corpus(asked, tmp_path / "silent", tmp_path / "raw", progress=False)
    assert capsys.readouterr().err == ""


def test_much_that_is_lost_of_wrapped_text_is_told(tmp_path, capsys):
    """Below half of the bytes there is advice; a source that keeps half has none."""
    wrapped = ["Õ" * 59 + str(number) for number in range(30)]
    text = [estonian_document(number).replace("\n", " ") for number in range(12)]
    for number, is_told in ((4, True), (12, False)):
        paragraphs = [line for one in text[:number] for line in (one, "")]
        path = write(tmp_path / "a.txt", [*wrapped[: 30 if is_told else 22], "", *paragraphs])
        shutil.rmtree(tmp_path / "corpus", ignore_errors=True)
        made = run(tmp_path, {"path": path}, min_line_characters=62)
        (of,) = made.counts["sources"]
        assert (of["bytes_kept"] < 0.5 * of["bytes_in"]) is is_told
        told = f"a: {of['bytes_kept'] / of['bytes_in']:.0%} of the text is kept. {path} looks wrapped at 6"
        assert (told in capsys.readouterr().err) is is_told


def test_a_file_that_changes_meanwhile_and_an_empty_one(tmp_path, monkeypatch):
    """Each is named; equal stamps before and after are no change."""
    raw = RawSource(
        "a", str(tmp_path), ("a.txt",), "text", True, "lines", ("text",), None, "o", ((3, 7),), "f"
    )
    stamps = {"now": ((3, 7),)}
    monkeypatch.setattr(input_files, "file_stamps", lambda root, files: stamps["now"])

    def read(**counts) -> Tally:
        return Tally("read", "", {"a": Counter({(what, ""): n for what, n in counts.items()})}, [])

    (described,) = corpus_run.describe_read((raw,), read(bad=4, damaged_bytes=2))
    assert (described.bytes_in, described.documents_in, described.bad_records) == (0, 4, 4)
    assert described.damaged_file_bytes == 2
    (described,) = corpus_run.describe_read((raw,), read(documents_left=2, bytes_left=5, bad=1))
    assert (described.documents_in, described.bytes_in, described.file_bytes) == (3, 5, 3)
    assert (described.bad_records, described.damaged_file_bytes) == (1, 0)
    with pytest.raises(KieloError, match=r"corpus.sources, a: no document in o \(1 files\)"):
        corpus_run.describe_read((raw,), Tally("read", "", {}, []))
    for now in ((4, 7), (3, 8)):
        stamps["now"] = (now,)
        with pytest.raises(KieloError, match="a.txt: changed while the corpus was read"):
            corpus_run.describe_read((raw,), read(documents_left=2))


@pytest.mark.parametrize(
    "source, lines, words",
    [
        (
            {},
            ENGLISH,
            "kind = 'text', language = et by py3langid, line threshold 0.5, document threshold 0.5)",
        ),
        ({"kind": "code"}, None, "kind = 'code').*Is it code by hand"),
        (PAIR, ["a\ta"], "kind = 'parallel').*Are the sides in the languages of `language`"),
        (
            {"kind": "instructions"},
            ['{"messages": []}'],
            "kind = 'instructions').*Do user and assistant take",
        ),
        ({"clean": False}, ["", " "], None),
        ({"clean": False}, ["  x"], None),
    ],
)
def test_a_source_of_which_nothing_is_left_gets_its_own_advice(tmp_path, source, lines, words):
    """By its kind; the settings of languages are told where it has them."""
    path = tmp_path / {"code": "a.py", "parallel": "a.tsv", "instructions": "a.jsonl"}.get(
        source.get("kind"), "a.txt"
    )
    write(path, lines or ["(((" * 30])
    own = {"name": "own", "path": str(path)} | source
    if words is None:
        first = {"name": "first", "path": write(tmp_path / "b.txt", ["  x"]), "clean": False}
        if lines == ["  x"]:
            with pytest.raises(
                KieloError, match="(?s)own .kind = 'text'.*seen before.*An earlier source has the same text"
            ):
                run(tmp_path, first, own)
        else:
            with pytest.raises(KieloError, match="own: no document in"):
                run(tmp_path, first, own)
        return
    with pytest.raises(KieloError, match="(?s)" + words.replace("(", r"\(").replace(")", r"\)")):
        run(tmp_path, own)


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    with write_stage(tmp_path / "corpus", "tokens", 1, {}, {}):
        pass
    with pytest.raises(KieloError, match="corpus: contains .* Kielo's corpus stage did not write"):
        run(tmp_path, {"path": write(tmp_path / "a.txt", ESTONIAN)})
    assert not (tmp_path / "raw").exists()  # before anything is fetched or hashed


def test_text_without_words_and_text_that_is_trained_on(tmp_path):
    """Numbers are no words; what a checkpoint was trained on is not cleaned again."""
    source = {"path": write(tmp_path / "a.txt", ["12 34", "5"]), "clean": False}
    made = run(tmp_path, source)
    assert (made.counts["words_kept"], made.counts["documents_kept"], made.counts["bytes_kept"]) == (0, 2, 8)
    (tmp_path / "train" / "checkpoints" / "step_0000000001").mkdir(parents=True)
    assert run(tmp_path, source) == made
    with pytest.raises(KieloError, match="would be made again .* has step_0000000001, which was trained"):
        run(tmp_path, source | {"max_documents": 1})


# --- Settings and steps ---


def cards(**changes):
    """Estonian and Norwegian Bokmål, with thresholds and letters by hand."""
    first = language("et").model_copy(
        update={
            "identifier_codes": {"lid176": ("et", "x"), "py3langid": ()}, "letters": "aõ",
            "unicode_scripts": ("Latin",), "line_language_threshold": {"lid176": 0.7},
            "document_language_threshold": {},
        }
    )  # fmt: skip
    second = language("nb").model_copy(
        update={
            "identifier_codes": {"lid176": ("no", "x")}, "letters": "aå",
            "unicode_scripts": ("Latin", "Greek"),
            "line_language_threshold": {"lid176": 0.4}, "document_language_threshold": {"lid176": 0.9},
        }
    )  # fmt: skip
    return [first, second]


def test_a_rule_of_two_languages():
    """Codes, scripts and letters of both once, and the lower thresholds; 0.5 where a card has none, and the
    recipe's where it sets any, 0 among them.
    """
    open_ones = Corpus(sources="a.txt", language_identifier="lid176")
    rule = language_rule(open_ones, cards())
    assert (rule.languages, rule.identifier_codes) == (("et", "nb"), ("et", "x", "no"))
    assert (rule.scripts, rule.letters) == (("Latin", "Greek"), "aõå")
    assert (rule.line_threshold, rule.document_threshold) == (0.4, 0.5)
    assert language_rule(open_ones, cards()[:1]).line_threshold == 0.7
    assert language_rule(open_ones, cards()[1:]).document_threshold == 0.9
    bare = cards()[1].model_copy(update={"line_language_threshold": {"py3langid": 0.9}})
    assert language_rule(open_ones, [bare]).line_threshold == 0.5
    for line, document in ((0.0, 0.3), (0.8, 0.0)):
        corpus = Corpus(
            sources="a.txt", language_identifier="lid176", line_language_threshold=line,
            document_language_threshold=document,
        )  # fmt: skip
        rule = language_rule(corpus, cards())
        assert (rule.line_threshold, rule.document_threshold) == (line, document)
    with pytest.raises(KieloError, match="py3langid does not know Estonian. Fix: lid176"):
        language_rule(Corpus(sources="a.txt"), cards())
    nobody = [cards()[0].model_copy(update={"identifier_codes": {}})]
    with pytest.raises(
        KieloError, match="does not know Estonian. Fix: an identifier of your own .* clean = false"
    ):
        language_rule(open_ones, nobody)


def test_a_pair_that_is_not_cleaned_needs_no_known_language(tmp_path, monkeypatch) -> None:
    """A card without codes for the identifier: the pair is laid out without rules of languages."""
    bare = cards()[0].model_copy(update={"identifier_codes": {}})
    monkeypatch.setattr("kielo.corpus.pipeline.language", lambda code: bare)
    source = PAIR | {"path": "pairs.tsv", "clean": False}
    recipe = SimpleNamespace(corpus=Corpus(sources=[source]), language="et")
    names = [step.name for step in first_pass(recipe, ReadPart(None, None, 99))]
    assert any("pair" in name.lower() for name in names) and not any(
        "language" in name.lower() for name in names
    )


def test_fields_of_sources():
    """Their own, or those of their kind; pairs by their languages; conversations under either name."""
    of = {
        ("text",): {}, ("content",): {"kind": "code"}, ("x",): {"text_field": "x"}, ("en", "et"): PAIR,
        ("a", "b"): PAIR | {"pair_fields": ["a", "b"]},
        ("messages", "conversations"): {"kind": "instructions"},
        ("turns",): {"kind": "instructions", "text_field": "turns"},
    }  # fmt: skip
    for fields, keys in of.items():
        assert text_fields(Source(name="a", path="a.jsonl", **keys)) == fields


def test_settings_of_all_sources():
    """All that decides the outcome, in the order of the sources; what does not is left out."""
    sources = [
        {"name": "b", "path": "b.txt", "max_documents": 5, "documents": "paragraphs"},
        {"name": "a", "path": "a.tsv", "templates": ["{source}{target}"], "reverse_share": 0.25, **PAIR},
        {"name": "c", "path": "c.txt", "clean": False, "language": ["fi"]},
        {"name": "d", "path": "d.jsonl", "kind": "code"},
    ]
    corpus = Corpus(sources=sources, workers=7, max_bad_share=0.5, min_line_characters=3)
    found = effective_settings(corpus, language("et"))
    assert found["sources"] == ["b", "a", "c", "d"] and found["max_documents"] == [5, None, None, None]
    assert found["text_fields"] == [("text",), ("en", "et"), ("text",), ("content",)]
    assert found["layouts"] == {"a": [(), ("{source}{target}",), 0.25]}
    assert found["documents"] == ["paragraphs", "lines", "lines", "lines"]
    assert found["kinds"] == ["text", "parallel", "text", "code"] and found["clean"] == [
        True,
        True,
        False,
        True,
    ]
    assert found["source_languages"] == [("et",), ("en", "et"), ("fi",), ()]
    assert list(found["language_rules"]) == ["b"] and found["language_rules"]["b"]["languages"] == ("et",)
    assert (found["language"], found["min_line_characters"]) == ("et", 3)
    assert (
        "workers" not in found
        and "max_bad_share" not in found
        and found["code"]["max_line_characters"] == 1000
    )
    own = language("et")
    assert (
        found["identifier_codes"] == list(own.identifier_codes["py3langid"])
        and found["letters"] == own.letters
    )
    assert found["scripts"] == list(own.unicode_scripts)
    assert found["line_language_threshold"] == own.line_language_threshold["py3langid"]
    assert found["document_language_threshold"] == own.document_language_threshold["py3langid"]
    first, second = (language_rule(corpus, [language(code)]) for code in corpus.sources[1].language)
    assert (first.languages, second.languages) == (("en",), ("et",))
    assert list(language_rules(corpus, "fi")) == ["b"] and language_rules(corpus, "fi")["b"].languages == (
        "fi",
    )


def test_steps_and_the_sources_that_they_see():
    """Of each kind of source its own, in their order; cleaned text by language, others only whole."""
    chats = {"kind": "instructions"}
    sources = [
        {"name": "own", "path": "a.txt"}, {"name": "fi", "path": "b.txt", "language": ["fi"]},
        {"name": "done", "path": "c.txt", "clean": False}, {"name": "code", "path": "d", "kind": "code"},
        {"name": "pair", "path": "e.tsv", **PAIR}, {"name": "raw", "path": "f.tsv", "clean": False, **PAIR},
        {"name": "chat", "path": "g.jsonl", **chats},
        {"name": "any", "path": "h.jsonl", "clean": False, **chats},
        {"name": "kept", "path": "i", "kind": "code", "clean": False},
    ]  # fmt: skip

    def names(steps):
        return [(step.name, step.detail, None if step.only is None else sorted(step.only)) for step in steps]

    def recipe(*wanted, **keys):
        own = [source for source in sources if source["name"] in wanted]
        return Recipe(name="t", language="et", corpus=Corpus(sources=own, **keys))

    every, reader = recipe(*(source["name"] for source in sources)), ReadPart(None, None, 99)
    of_lines = ("script", "line length", "line language")
    language_steps = [(name, code, [of]) for code, of in (("et", "own"), ("fi", "fi")) for name in of_lines]
    language_steps += [("document language", "et", ["own"]), ("document language", "fi", ["fi"])]
    assert names(first_pass(every, reader)) == [
        ("read", "", None), ("content", "", ["any", "chat", "code", "done", "kept"]),
        ("normalise", "", ["fi", "own"]), *language_steps, ("code line length", "", ["code"]),
        ("generated code", "", ["code"]), ("alphanumeric share", "", ["code"]),
        ("normalise pairs", "", ["pair"]), ("pairs", "", ["pair", "raw"]),
        ("pair language", "en of pair", ["pair"]), ("pair language", "et of pair", ["pair"]),
        ("lay out pairs", "pair", ["pair"]), ("lay out pairs", "raw", ["raw"]),
        ("conversations", "", ["any", "chat"]), ("turns", "", ["chat"]),
    ]  # fmt: skip
    few = ["normalise", *of_lines, "document language"]
    assert names(first_pass(recipe("own"), reader)) == [
        ("read", "", None), *((name, "", ["own"]) for name in few)
    ]  # fmt: skip
    assert names(first_pass(recipe("any"), reader)) == [
        ("read", "", None), ("content", "", ["any"]), ("conversations", "", ["any"]),
    ]  # fmt: skip
    assert [step.side for step in first_pass(every, reader) if step.name == "pair language"] == [0, 1]
    flags = np.zeros(1, bool)

    def second(corpus):
        copies = DocumentDuplicates(flags), LineDuplicates(flags, flags)
        return second_pass(corpus, SplitAgain(), copies[:1], copies[1:], Path("y"))

    steps = second(every.corpus)
    assert names(steps) == [
        ("merge cleaned", "", None), ("document duplicates", "", None),
        ("line duplicates", "", ["fi", "own"]), ("document length", "", ["fi", "own"]), ("write", "", None),
    ]  # fmt: skip
    assert (steps[-1].folder, steps[3].min_characters) == (Path("y"), 100)
    assert [step.name for step in second(recipe("code").corpus)] == [
        "merge cleaned", "document duplicates", "write"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "keys, rounds",
    [
        ({}, "clean copies choose lines keep borders write"),
        ({"deduplicate_lines": False}, "clean copies choose keep borders write"),
        ({"deduplicate_documents": False}, "clean lines keep borders write"),
        ({"deduplicate_documents": False, "deduplicate_lines": False}, "clean borders write"),
        ({"deduplicate_documents": False, "clean": False}, "clean borders write"),
        ({"deduplicate_documents": False, "clean": False, "max_documents": 1}, "count clean borders write"),
    ],
)
def test_rounds_of_a_corpus(tmp_path, keys, rounds):
    """Text that nothing compares is read once."""
    of_source = {key: keys[key] for key in ("clean", "max_documents") if key in keys}
    of_corpus = {key: value for key, value in keys.items() if key not in of_source}
    sources = [{"path": write(tmp_path / "a.txt", ESTONIAN)} | of_source]
    recipe = Recipe(name="t", language="et", corpus=Corpus(sources=sources, **of_corpus))
    tasks, _, _ = corpus_run.plan_corpus(recipe, tmp_path / "corpus", tmp_path / "raw")
    assert tasks.rounds == rounds.split()
