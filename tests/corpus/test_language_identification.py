"""Thresholds of languages at, below and above their values, on identifiers that say what the text says."""

from types import SimpleNamespace

import fasttext
import pytest

from kielo.corpus.filters import LineLanguage, LineLength, ScriptFilter, document_filters, line_filters
from kielo.corpus.language_identification import THRESHOLDS, LanguageFilter, Lid176, load_identifier
from kielo.corpus.step import LanguageRule
from kielo.recipe.sections import Corpus
from tests.corpus.counted import counted


class Spoken:
    """Reads "et=0.5 no=0.25" as these probabilities, and keeps what it was asked."""

    def __init__(self):
        self.asked = []

    def probabilities(self, text):
        self.asked.append(text)
        pairs = (part.split("=") for part in text.split() if "=" in part)
        return {code: float(number) for code, number in pairs}


@pytest.fixture
def spoken(monkeypatch):
    identifier = Spoken()
    monkeypatch.setattr("kielo.corpus.language_identification.load_identifier", lambda name: identifier)
    return identifier


class Judge(LanguageFilter):
    name = "judge"

    def work(self, document):
        raise NotImplementedError


def judge(codes, threshold) -> Judge:
    return Judge("spoken", codes, threshold)


def test_a_threshold_is_reached_at_its_value(spoken):
    """Of all codes of the language together; what misses it is told apart by the best guess."""
    step = judge(["no", "nb"], 0.75)
    assert step.verdict("no=0.25 nb=0.5 da=0.2", 1) is None
    assert step.verdict("no=0.7499 da=0.2", 1) == "not sure enough"
    assert step.verdict("nb=0.3 no=0.25 da=0.45", 1) == "looks like da"
    assert step.verdict("", 1) == "looks like ?" and step.verdict("nb=1.0", 1) is None


def test_bytes_are_counted_at_each_threshold_that_is_reached(spoken):
    """At a threshold's own value too; what is kept does not matter."""
    step = judge(["et"], 0.99)
    for probability, size in ((0.5, 1), (0.64, 10), (0.65, 100), (0.95, 1000), (0.1, 10_000)):
        assert step.verdict(f"et={probability}", size) is not None
    assert THRESHOLDS == (0.5, 0.65, 0.8, 0.9, 0.95)
    assert counted(step) == {
        "bytes_identified/": 11_111, "bytes_at/0.5": 1111, "bytes_at/0.65": 1100, "bytes_at/0.8": 1000,
        "bytes_at/0.9": 1000, "bytes_at/0.95": 1000,
    }  # fmt: skip


def test_the_first_4000_characters_are_read_and_short_texts_once(spoken):
    """Texts of up to 200 characters are remembered."""
    step = judge(["et"], 0.5)
    for size in (199, 200, 201, 4000, 5000):
        text = "et=0.9 ".ljust(size, "a")
        assert step.verdict(text, 1) is None and step.verdict(text, 1) is None
    assert [len(text) for text in spoken.asked] == [199, 200, 201, 201, 4000, 4000, 4000, 4000]


def test_fasttext_reads_a_line_and_capitals_as_small_letters(monkeypatch):
    """The ten best, without their prefix, and none above 1."""
    asked = []

    def predict(text, k):
        asked.append((text, k))
        return ("__label__et", "__label__fi"), (1.0000125, 0.25)

    monkeypatch.setattr(fasttext, "load_model", lambda path: SimpleNamespace(predict=predict))
    lid = Lid176()
    for text in ("TERE\nMAAILM", "Tere MAAILM", "tere"):
        assert lid.probabilities(text) == {"et": 1.0, "fi": 0.25}
    assert asked == [("tere maailm", 10), ("Tere MAAILM", 10), ("tere", 10)]


def test_each_identifier_is_loaded_once():
    found = {name: load_identifier(name) for name in ("py3langid", "lid176")}
    assert {name: type(one).__name__ for name, one in found.items()} == {
        "py3langid": "Py3langid", "lid176": "Lid176"
    }  # fmt: skip
    assert all(load_identifier(name) is one for name, one in found.items())
    assert sum(found["py3langid"].probabilities("Tere tulemast koju").values()) == pytest.approx(1)


def test_filters_take_their_own_settings():
    """Lines those of lines and documents that of documents, cheap ones first."""
    corpus = Corpus(sources="a.txt", max_foreign_character_share=0.3, min_line_characters=7)
    rule = LanguageRule(("sr", "bs"), ("sr", "bs", "hr"), ("Latin", "Cyrillic"), "đ", 0.2, 0.6)
    script, length, line = line_filters(corpus, rule)
    (document,) = document_filters(corpus, rule)
    assert [type(one) for one in (script, length, line)] == [ScriptFilter, LineLength, LineLanguage]
    assert (script.scripts, script.letters, script.max_foreign_share) == (("Latin", "Cyrillic"), "đ", 0.3)
    assert length.min_characters == 7
    assert (line.identifier, line.codes, line.threshold) == ("py3langid", ("sr", "bs", "hr"), 0.2)
    assert (document.identifier, document.codes, document.threshold) == (
        "py3langid",
        rule.identifier_codes,
        0.6,
    )
