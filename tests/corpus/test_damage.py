"""Damaged text is mended or dropped by class, beside the text before the damage."""

import time
from unicodedata import normalize

import pytest
import regex
from xxhash import xxh3_64_hexdigest

from kielo.artifact.stage_counts import Funnel
from kielo.artifact.stage_json import read_json
from kielo.corpus.corpus_stage import run_corpus
from kielo.corpus.damage import (
    Capitals,
    KeywordLists,
    LostDiacritics,
    MendLoops,
    MendSpacedLetters,
    line_filters,
    not_judged,
)
from kielo.corpus.step import cards_of_text, effective_settings, language_rules, split_document
from kielo.recipe.cards import language
from kielo.recipe.quality_limits import limits_of, marked_letters_of
from kielo.recipe.sections import Corpus
from tests.corpus.counted import counted
from tests.corpus.texts import ESTONIAN, recipe

GREEK = "Η γιαγιά καθόταν το βράδυ μπροστά στο τζάκι και διηγόταν στα παιδιά ιστορίες από τα νιάτα της. " * 6
HINDI = "शाम को दादी अलाव के सामने बैठकर बच्चों को अपनी जवानी की लंबी कहानियाँ सुनाती थीं।"


def after(step, text: str) -> str | None:
    document = split_document(text, "d/0", "d", (0, 0), {})
    return document.join() if list(step.run([document])) else None


def words_of(step, reason: str) -> int:
    return step.counts["d"]["spaced_words", reason]


def without_marks(text: str) -> str:
    return "".join(one for one in normalize("NFD", text) if not regex.match(r"\p{Mn}", one))


@pytest.mark.parametrize("text", [ESTONIAN[0], HINDI, "Kell 12.30, „Jah“ – ütles ta."])
def test_spaced_letters_are_joined(text):
    step = MendSpacedLetters(has_spaces=True)
    assert after(step, " ".join(text)) == text and counted(step)["mended/spaced letters"] == 1
    assert after(step, text) == text


def test_spaced_letters_without_gaps_between_words_are_dropped():
    bare = " ".join(ESTONIAN[0].replace(" ", ""))
    step = MendSpacedLetters(has_spaces=True)
    assert after(step, f"{ESTONIAN[1]}\n{bare}") == ESTONIAN[1]
    assert counted(step)["lines/letters with spaces between them"] == 1
    assert words_of(step, "letters with spaces between them") == len(bare.split())
    assert (
        after(MendSpacedLetters(has_spaces=False), "今 天 天 气 很 好 我 们 走 吧") == "今天天气很好我们走吧"
    )


@pytest.mark.parametrize("piece", ["kõrged kuused, ", "jah oh ", "我们走吧今天天气", f"{ESTONIAN[4]} "])
@pytest.mark.parametrize("copies", [9, 40])
def test_one_piece_of_a_loop_stays(piece, copies):
    before, behind = f"{ESTONIAN[2]} ", f"Siis tuli {ESTONIAN[3]}"
    step = MendLoops()
    assert after(step, before + piece * copies + behind) == before + piece + behind
    assert words_of(step, "repeated in a row") == (copies - 1) * piece.count(" ")
    whole = "\n".join([*ESTONIAN, "-" * 200, "Jah, jah, jah! Ei, ei.", piece * 2])
    assert after(step, whole) == whole and counted(step)["mended/loops"] == 1


@pytest.mark.parametrize("row", ["_", ".-", "0", "_" * 250 + "a"])
def test_a_long_row_of_signs_stays_and_costs_little(row):
    """Its time was cubic: minutes for a line of 10,000 characters, and days for this one."""
    line = f"{ESTONIAN[2]} {row * (100_000 // len(row))}"
    begin = time.process_time()
    assert after(MendLoops(), f"{line} {ESTONIAN[3]}") == f"{line} {ESTONIAN[3]}"
    assert time.process_time() - begin < 20


def test_capitals_go_and_headings_stay():
    text = "\n".join(ESTONIAN[:4])
    assert after(Capitals(), text.upper()) is None
    assert after(Capitals(), f"PEATÜKK 1. LOOM\n{ESTONIAN[5].upper()}\n{text}") == f"PEATÜKK 1. LOOM\n{text}"
    assert after(Capitals(), HINDI) == HINDI


def test_keyword_lists_go_and_sentences_stay():
    step, words = KeywordLists(frozenset({"ja", "on"})), " ".join(ESTONIAN).replace(".", "").split()
    listed_words = [word for word in words if len(word) > 4]
    bare = " ".join(words).replace(",", "").replace(" ja ", " ")
    for listed in (", ".join(listed_words), " | ".join(listed_words), bare):
        assert after(step, listed) is None
    names = "Kohal olid Mari, Jüri, Ants, Liis ja veel paljud teised, kes elasid metsa ääres, ning laulsid."
    text = f"{names}\n{' '.join(ESTONIAN)}"
    assert after(step, text) == text


@pytest.mark.parametrize(("code", "text"), [("et", " ".join(ESTONIAN * 2)), ("el", GREEK)])
def test_text_without_its_marks_goes(code, text):
    step = LostDiacritics(marked_letters_of(code) or 0)
    assert after(step, text) == text and after(step, without_marks(text)) is None
    short = without_marks(text)[:100]
    assert after(step, short) == short  # too few letters to tell


def test_the_classes_in_a_corpus(tmp_path, capsys):
    """Mended lines and reasons are counted by source, and a key at its default leaves no trace."""
    source, texts = tmp_path / "in.txt", [" ".join(ESTONIAN), " ".join(ESTONIAN[::-1])]
    damaged = [" ".join(texts[0]), texts[1] + " Metsa all on vana maja." * 9, texts[0].upper()]
    source.write_text("\n".join(damaged))
    keys = {"damage": ("spaced_letters", "loops", "capitals", "keyword_lists", "lost_diacritics")}
    run_corpus(recipe(source, **keys), tmp_path / "corpus", tmp_path / "raw")
    funnel = read_json(tmp_path / "corpus", Funnel)
    (described,) = funnel.sources
    assert (described.documents_kept, described.mended) == (2, {"loops": 1, "spaced letters": 1})
    (row,) = (row for row in funnel.steps if row.name == "capitals")
    assert (row.reason, row.lines) == ("all capitals", 1)
    assert "lines mended: 1 loops, 1 spaced letters" in capsys.readouterr().err
    assert "damage" not in effective_settings(Corpus(sources=str(source)), language("et"))


def test_corpora_of_other_stop_words_are_not_current():
    """Their hash is a setting if a keyword list is known by them: not of several languages, or without."""
    texts = [{"name": "a", "path": "a.txt"}, {"name": "b", "path": "b.txt", "language": ["fo"]}]
    lists, loops = (Corpus(sources=texts, damage=(name,)) for name in ("keyword_lists", "loops"))
    found = effective_settings(lists, language("et"))["stop_words"]
    words = " ".join(sorted(word.lower() for word in limits_of(["fo"]).stop_words))
    assert list(found) == ["a", "b"] and found["b"] == xxh3_64_hexdigest(words.encode()) != found["a"]
    both = Corpus(sources=[texts[0] | {"language": ["et", "fi"]}], damage=("keyword_lists",))
    for corpus in (loops, both):
        assert "stop_words" not in effective_settings(corpus, language("et"))


def test_a_card_of_ones_own_needs_no_shipped_card(tmp_path):
    """The steps take from it whether words have spaces between them."""
    for code, script in (("qaa", "Latin"), ("qab", "Thai")):
        (tmp_path / f"{code}.toml").write_text(
            f'code = "{code}"\nname = "Own"\nscript = "{script}"\nidentifier_codes = {{py3langid = ["et"]}}\n'
        )
    names = [str(tmp_path / f"{code}.toml") for code in ("qaa", "qab")]
    sources = [{"name": name[-8:-5], "path": "a.txt", "language": [name]} for name in names]
    corpus = Corpus(sources=sources, damage=("keyword_lists", "capitals"))
    rules = language_rules(corpus, names[0])
    steps = {source: [step.name for step in line_filters(corpus, rule)] for source, rule in rules.items()}
    assert steps == {"qaa": ["capitals", "keyword lists"], "qab": ["capitals"]}
    assert not_judged(corpus.damage, cards_of_text(corpus, names[0])) == (
        "keyword lists in qab and keyword lists without commas in qaa"
    )
    assert "has_spaces" not in effective_settings(corpus, language("et"))["language_rules"]["qab"]
