"""Minimal pairs that rules make: held to what each rule says of them, in a language of a few stems."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from kielo.evaluate.made_pairs import is_word, learn_morphology, make_pairs, sentences_of
from tests.evaluate.test_bits_per_byte import byte_tokenizer

STEMS = [
    first + second + "a" for first, second in product(("kal", "lin", "mer", "tor", "pil"), ("k", "m", "t"))
]
SUFFIXES = ["", "d", "le", "st"]
WORDS = [stem + suffix for stem in STEMS for suffix in SUFFIXES]
# Words of one stem alone, whose other suffixes are then wrong.
LONELY = ["soolikale", "hobusele", "tuvigale", "raamatule"]


def texts(number: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    lines = [" ".join(["Siis", *random.choice([*WORDS, *LONELY], 7), "lõpp."]) for _ in range(number)]
    return ["\n".join(lines[start : start + 5]) for start in range(0, number, 5)]


@pytest.fixture(scope="module")
def made():
    return make_pairs(texts(300, 1), texts(900, 2), byte_tokenizer(), 80, 1)


def test_word_order_changes_places_of_two_neighbours(made) -> None:
    pairs = [pair for pair in made.pairs if pair.group == "word_order"]
    assert len(pairs) == len({pair.good for pair in pairs}) == 80
    for pair in pairs:
        good, bad = pair.good.split(), pair.bad.split()
        (first, second) = [n for n, (one, other) in enumerate(zip(good, bad, strict=True)) if one != other]
        assert second == first + 1 and (good[first], good[second]) == (bad[second], bad[first])
        assert first > 0 and second < len(good) - 1


def changed(pair) -> tuple[str, str]:
    """Return the word that differs, as it is and as it was made."""
    (found,) = [
        words for words in zip(pair.good.split(), pair.bad.split(), strict=True) if words[0] != words[1]
    ]
    return found


def test_swapped_suffixes_come_in_twos(made) -> None:
    """Both are forms of one stem, and each is as often right as wrong."""
    found = [changed(pair) for pair in made.pairs if pair.group == "suffix_swap"]
    assert len(found) == 80 and Counter(found) == Counter((bad, good) for good, bad in found)
    for good, bad in found:
        assert good[:5] == bad[:5] in STEMS and {good[5:], bad[5:]} <= set(SUFFIXES)


def test_wrong_endings_make_no_word(made) -> None:
    """As many tokens (here bytes), a suffix that others have, and no word of the text."""
    found = [changed(pair) for pair in made.pairs if pair.group == "wrong_ending"]
    assert found
    for good, bad in found:
        assert good in LONELY and bad not in WORDS + LONELY and len(good) == len(bad)
        assert (good[:-2], bad[-2:]) == (bad[:-2], "st")


def test_pairs_are_of_heldout_text_and_always_the_same(made) -> None:
    """A sentence that the training text has is left out and counted; another seed makes others."""
    heldout, training = texts(300, 1), texts(900, 2)
    sentences = {sentence for text in heldout for sentence in sentences_of(text)}
    assert {pair.good for pair in made.pairs} <= sentences
    assert (made.num_sentences, made.num_in_training) == (len(sentences), 0)
    assert make_pairs(heldout, training, byte_tokenizer(), 80, 1) == made
    assert make_pairs(heldout, training, byte_tokenizer(), 80, 2).pairs != made.pairs
    known = make_pairs(heldout, [*training, heldout[0]], byte_tokenizer(), 5, 1)
    assert (known.num_sentences, known.num_in_training) == (len(sentences) - 5, 5)
    assert not {pair.good for pair in known.pairs} & set(sentences_of(heldout[0]))
    assert make_pairs([], training, byte_tokenizer(), 5, 1).pairs == ()


def test_what_is_a_sentence_a_word_and_a_suffix() -> None:
    text = "Üks kaks kolm neli.  Viis kuus seitse kaheksa üheksa? Jah, see on  hea lause!\n" + "a " * 31
    assert list(sentences_of(text)) == ["Viis kuus seitse kaheksa üheksa?", "Jah, see on hea lause!"]
    assert [is_word(one) for one in ("õun", "नमस्ते", "a1", "on,", "")] == [True, True, False, False, False]
    morphology = learn_morphology(texts(900, 2), ["uus lõpp. 9"])
    assert set(morphology.partners) == set(SUFFIXES) and set(morphology.partners["d"]) == {"", "le", "st"}
    assert "uus" in morphology.words and "uus" not in morphology.forms
    assert learn_morphology(["kalad kala"]).partners == {}
