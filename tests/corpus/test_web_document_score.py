"""HPLT's score: what its program is asked, the border of the filter, and the program's own numbers."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kielo.corpus import web_document_score
from kielo.corpus.filters import document_filters
from kielo.corpus.step import language_rule, split_document
from kielo.corpus.web_document_score import WebDocumentScore
from kielo.recipe.cards import language
from kielo.recipe.check import check
from kielo.recipe.errors import KieloError
from kielo.recipe.quality_limits import names_for_score
from kielo.recipe.sections import Corpus, Recipe
from tests.corpus.counted import counted
from tests.corpus.texts import ESTONIAN

PROSE = "\n".join(ESTONIAN)


class Published:
    """Stands for the program: its first argument's text is its score."""

    config = SimpleNamespace(LANGUAGES=["ekk"], modeled_punctuation=["ekk_latn", "est_latn", "fin_latn"])

    def __init__(self):
        self.asked = []

    def score_document(self, language, script, of_lines, text, id, raw_score):
        self.asked.append((language, script, of_lines, raw_score))
        return float(text.split()[0])


@pytest.fixture
def published(monkeypatch):
    program = Published()
    monkeypatch.setattr(web_document_score, "scorer", lambda: program)
    return program


def test_documents_of_a_low_score_go(published):
    corpus = Corpus(sources="a.txt", quality="hplt", language_identifier="lid176")
    step = document_filters(corpus, language_rule(corpus, [language("et")]))[-1]
    documents = [split_document(text, "d/0", "d", (0, 0), {}) for text in ("0.5 a\nb", "0.4999")]
    assert list(step.run(documents)) == documents[:1]
    assert counted(step)["documents/web document score under 0.5"] == 1
    assert published.asked[0] == ("ekk", "Latn", ["ekk_Latn"] * 2, True)  # with data of its own before est


def test_names_of_languages(published):
    """Related languages' data before the script's; a language without a name, and two of one source."""
    assert names_for_score(["se"])[0] == "sme_Latn"
    step = WebDocumentScore(["qaa_Latn", "fin_Latn"])
    assert step.score("1") == 1 and published.asked[-1][0] == "fin"
    with pytest.raises(KieloError, match="et and fi have different scores"):
        names_for_score(["et", "fi"])
    with pytest.raises(KieloError, match=r"aa has no name in HPLT\. Fix: hplt = "):
        names_for_score(["aa"])
    corpus = {"sources": [{"name": "a", "path": "a.txt"}], "quality": "hplt"}
    data = {"name": "r", "language": "aa", "corpus": corpus}
    found = [one.message for one in check(Recipe.model_validate(data), lambda key: "file")]
    assert any("corpus.sources, a: corpus.quality" in message for message in found)


def test_without_the_program(monkeypatch):
    monkeypatch.setitem(sys.modules, "docscorer", ModuleType("docscorer"))
    monkeypatch.setitem(sys.modules, "docscorer.configuration", None)
    with pytest.raises(KieloError, match=r'needs HPLT.s docscorer .*Fix: pip install "docscorer @ git'):
        web_document_score.scorer.__wrapped__()


# docscorer 1.3.0 at commit 743d131, called by hand with lines of ekk_Latn.
SCORES = [
    (PROSE, 0.8),
    (f"{PROSE}\n# @ | > # @ | >", 0.6982072728111544),
    (PROSE + "\n1998 2003, 2017" * 9, 0.04193273285568394),
    (f"{PROSE}\n{PROSE}", 0.0),
]


@pytest.mark.parametrize(("text", "score"), SCORES)
def test_scores_are_the_programs(text, score):
    pytest.importorskip("docscorer")
    assert WebDocumentScore(names_for_score(["et"])).score(text) == pytest.approx(score, abs=1e-12)
