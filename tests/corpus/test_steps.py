"""Each step drops what it should, keeps what it must, and counts both."""

import tracemalloc
import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from kielo.corpus.duplicates import DocumentDuplicates, LineDuplicates, document_hash, line_hashes
from kielo.corpus.filters import (
    DocumentLanguage,
    DocumentLength,
    LayOutPairs,
    LineLanguage,
    LineLength,
    Normalise,
    ScriptFilter,
    normalise_line,
)
from kielo.corpus.language_identification import THRESHOLDS
from kielo.corpus.step import effective_settings, split_document
from kielo.recipe.cards import language
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus
from tests.corpus.counted import counted
from tests.corpus.texts import ENGLISH, ESTONIAN


def _document(*lines, number=0):
    return split_document("\n".join(lines), f"d/{number}", "d", (0, number), {})


def _run(step, *documents):
    """The lines left of each document left, and the step's counts."""
    left = [document.lines for document in step.run(iter(documents))]
    return left, counted(step)


def test_normal_form():
    """NFC, no controls or invisible characters, single spaces; joiners, quotes and superscripts stay."""
    assert (
        normalise_line(unicodedata.normalize("NFD", " õhtul\t Šokk\u00ad \ufeffž\x00\x1b  "))
        == "õhtul Šokk ž"
    )
    assert normalise_line("x² ½ „tere“ \u06a9\u200c\u06a9") == "x² ½ „tere“ \u06a9\u200c\u06a9"
    left, counts = _run(Normalise(), _document("  ", "\u200b"), _document("a  b"))
    assert left == [["a b"]] and counts["documents/empty"] == 1


def test_script_by_share_of_letters():
    """Foreign letters up to the share stay, more are dropped; marks and names of the script are own."""
    step = ScriptFilter(["Latin"], "abc", 0.1)
    lines = ["Ångström ja Łódź 12 €", "kümme tähte я ja veel", "Привет, мир", "1234 — 56 %", "aя"]
    assert _run(step, _document(*lines))[0] == [[lines[0], lines[1], lines[3]]]
    card = language("ja")
    japanese = ScriptFilter(card.unicode_scripts, card.letters, 0.01)
    assert _run(japanese, _document("GPUで学習する", "Привет"))[0] == [["GPUで学習する"]]


def _own_script(line, scripts, letters="", share=0.0):
    return _run(ScriptFilter(scripts, letters, share), _document(line))[0] == [[line]]


def test_script_at_the_borders():
    """ASCII letters are own in Latin alone; a share that is just reached stays; a card's letters are own in
    either case; marks and letters of all scripts are own; an unknown script is named.
    """
    assert _own_script("Hello, world", ["Latin"]) and not _own_script("Hello, world", ["Cyrillic"])
    assert _own_script("Привет 12", ["Cyrillic"]) and not _own_script("Привет 12", ["Latin"])
    assert _own_script("12 — 34", ["Cyrillic"])
    assert _own_script("õõõя", ["Latin"], share=0.25) and not _own_script("õõõя", ["Latin"], share=0.2499)
    assert not _own_script("õõяõõя", ["Latin"], share=0.25) and not _own_script("õя", ["Latin"])
    assert _own_script("õõõя 1234", ["Latin"], share=0.25) and not _own_script(
        "õõя 1234", ["Latin"], share=0.25
    )
    for letters in ("я]", "Я]"):
        assert _own_script("õ яЯ", ["Latin"], letters) and not _own_script("õ яЯж", ["Latin"], letters)
    assert _own_script("õ \u02bc e\u0301\u0483", ["Latin"])  # of Common, and marks of Inherited
    with pytest.raises(KieloError, match="Unicode does not know a script of Latin, Klingon"):
        ScriptFilter(["Latin", "Klingon"], "", 0.1)


@pytest.mark.parametrize("identifier", ["py3langid", "lid176"])
def test_lines_of_another_language_go(identifier):
    """Both identifiers keep Estonian lines and drop English ones; counts at thresholds fall, in bytes."""
    document = _document(ESTONIAN[0], ENGLISH[0], ESTONIAN[1], ENGLISH[1])
    total = document.num_bytes
    left, counts = _run(LineLanguage(identifier, ["et"], 0.5), document, _document(*ENGLISH))
    assert left == [[ESTONIAN[0], ESTONIAN[1]]]
    assert counts["documents/looks like en"] == 1 and counts["lines/looks like en"] == 5
    shares = [counts.get(f"bytes_at/{threshold}", 0) for threshold in THRESHOLDS]
    assert shares == sorted(shares, reverse=True) and shares[0] < total < counts["bytes_identified/"]


def test_document_language_uses_all_lines():
    """A document is judged whole, and dropped whole with all its bytes counted."""
    english = _document(*ENGLISH)
    size = english.num_bytes
    left, counts = _run(DocumentLanguage("py3langid", ["et"], 0.5), english, _document(*ESTONIAN))
    assert left == [ESTONIAN] and counts["bytes/looks like en"] == size


@pytest.mark.parametrize("kind", [LineLanguage, DocumentLanguage])
def test_long_texts_are_not_remembered(kind, monkeypatch):
    """200 documents of 100 kB pass through and are not kept in memory (each worker had kept them)."""
    fixed = SimpleNamespace(probabilities=lambda text: {"et": 1.0})
    monkeypatch.setattr("kielo.corpus.language_identification.load_identifier", lambda name: fixed)
    documents = kind("fixed", ["et"], 0.5).run(
        _document(f"{number} " + "a" * 100_000) for number in range(200)
    )
    next(documents)
    tracemalloc.start()
    try:
        for _ in range(198):
            next(documents)
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_settings_follow_the_card_and_refuse_an_identifier_that_cannot():
    """Codes and thresholds come from the language's card unless the recipe sets them."""
    bokmaal = effective_settings(Corpus(sources="a.txt", document_language_threshold=0.7), language("nb"))
    assert bokmaal["identifier_codes"] == ["no"] and bokmaal["document_language_threshold"] == 0.7
    assert bokmaal["line_language_threshold"] == language("nb").line_language_threshold["py3langid"]
    unknown = language("et").model_copy(update={"identifier_codes": {"lid176": (), "py3langid": ("et",)}})
    with pytest.raises(KieloError, match="lid176 does not know Estonian. Fix: py3langid"):
        effective_settings(Corpus(sources="a.txt", language_identifier="lid176"), unknown)


def test_lengths_and_duplicates():
    """Lengths are in characters, borders included; of duplicates the first stays, wherever the second is."""
    assert _run(LineLength(4), _document("õõõ", "õõõõ"))[0] == [["õõõõ"]]
    assert _run(DocumentLength(5), _document("ab", "cd"), _document("ab", "c"))[0] == [["ab", "cd"]]
    flags, begins = np.array([0, 0, 1, 1, 0, 1], bool), np.array([0, 3, 4])
    step = LineDuplicates(flags, begins)
    lines = [_document("a", "b", "a"), _document("b", number=1), _document("c", "b", number=2)]
    left, counts = _run(step, *lines)
    assert left == [["a", "b"], ["c"]]
    assert (
        counts["lines/seen before"] == 3
        and counts["bytes/seen before"] == 6
        and counts["documents/seen before"] == 1
    )
    documents = [_document("a", "b"), _document("b", "a", number=1), _document("a", "b", number=2)]
    assert _run(DocumentDuplicates(np.array([False, False, True])), *documents)[0] == [["a", "b"], ["b", "a"]]


def test_xxhash_is_given_bytes(monkeypatch):
    """From version 4 on it takes no text."""
    hashed = []

    def digest(data: bytes, seed: int = 0) -> int:
        hashed.append(memoryview(data).tobytes())
        return len(hashed)

    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", digest)
    pair = _document()
    pair.set_sides(("õ", "y"))
    line_hashes(_document("õ"))
    document_hash(_document("õ", "b"))
    _run(LayOutPairs(["{source} {target}"], 0.0, ["et", "en"]), pair)
    assert list(dict.fromkeys(one.decode() for one in hashed)) == ["õ", "õ\nb", "õ\0y"]


def test_words_are_split_once_and_follow_their_lines():
    """The shared split: words of the lines left, without splitting again when lines are dropped."""
    document = _document("Tere, maailm 42!", "see on", "rock'n'roll e-kiri")
    words = document.words()
    assert words == [["Tere", "maailm"], ["see", "on"], ["rock'n'roll", "e-kiri"]]
    document.keep([True, False, True])
    assert document.words()[1] is words[2] and document.join() == "Tere, maailm 42!\nrock'n'roll e-kiri"
