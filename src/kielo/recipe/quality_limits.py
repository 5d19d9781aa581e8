"""Limits of the quality filters by language, as FineWeb2 has them: `cards/quality/fineweb2.json`.

`benchmarks/data/fineweb2_limits.py` writes the file from the configurations of `huggingface/fineweb-2`.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from kielo.recipe.cards import language
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Section

_CARDS = Path(__file__).resolve().parent.parent / "cards" / "quality"
MARKED_LETTERS = _CARDS / "marked_letters.json"
Share = float


class QualityLimits(Section):
    """Limits of one language. Defaults: Gopher's and FineWeb's for English, as in FineWeb2."""

    name: str = ""
    """FineWeb2's name of the language, such as ekk_Latn."""
    max_repeated_lines: Share = 0.3
    """Share of the lines that occurred before."""
    max_repeated_line_characters: Share = 0.1
    """Characters of these lines, as a share of the text's."""
    max_top_ngram: tuple[Share, Share, Share] = (0.2, 0.18, 0.16)
    """Characters of all occurrences of the most frequent sequence of 2, 3 and 4 words."""
    max_repeated_ngrams: tuple[Share, ...] = Field(
        (0.15, 0.14, 0.13, 0.12, 0.11, 0.10), min_length=6, max_length=6
    )
    """Characters of sequences of 5 to 10 words that occurred before."""
    min_ended_lines: Share = 0.12
    """Share of the lines that end with the sign of a sentence's end."""
    max_line_ends_per_word: float = 0.3
    min_words: int = 50
    max_words: int = 100_000
    min_mean_word_length: float = 3
    max_mean_word_length: float = 10
    max_signs_per_word: Share = 0.1
    """Hashes, or ellipses, for each word."""
    max_bullet_lines: Share = 0.9
    max_ellipsis_lines: Share = 0.3
    min_words_with_letters: Share = 0.8
    min_stop_words: int = 2
    """Different words of `stop_words` that a text must have."""
    stop_words: frozenset[str] = frozenset()


@cache
def _rows() -> dict[str, Any]:
    return json.loads((_CARDS / "fineweb2.json").read_text(encoding="utf-8"))["languages"]


@cache
def _marked_letters() -> dict[str, Share]:
    return json.loads(MARKED_LETTERS.read_text(encoding="utf-8"))["shares"]


def marked_letters_of(code: str) -> Share | None:
    """Return the share of a language's letters that have marks, or None if they are few or not known."""
    return _marked_letters().get(code)


def names_for_score(languages: Sequence[str]) -> tuple[str, ...]:
    """Return names such as est_Latn of a text's language in HPLT's scorer. Raise KieloError if none."""
    if len(languages) > 1:
        raise KieloError(
            f'corpus.quality = "hplt": {" and ".join(languages)} have different scores, and a source has '
            "both. Fix: a source for each language"
        )
    card = language(languages[0])
    given = (*card.hplt, *card.fineweb2)
    scripts = dict.fromkeys(name.partition("_")[2] for name in given)
    names = (*given, *(f"{code}_{script}" for script in scripts for code in card.iso639_3))
    if not names:
        raise KieloError(
            f'corpus.quality = "hplt": {languages[0]} has no name in HPLT. Fix: hplt = ["CODE_Script"] in a '
            "card of your own"
        )
    return tuple(dict.fromkeys(names))


def limits_of(languages: Sequence[str], is_cut: bool = False) -> QualityLimits:
    """Return the limits of a text's language, the code of a card. Raise KieloError if there are none.

    is_cut: whether a segmenter finds the words of languages without spaces (corpus.words = "icu").
    """
    if len(languages) > 1:
        raise KieloError(
            f'corpus.quality = "fineweb2": {" and ".join(languages)} have different limits, and a source has '
            "both. Fix: a source for each language"
        )
    if (found := known_limits(languages[0])) is None:
        raise KieloError(
            f'corpus.quality = "fineweb2": FineWeb2 has no limits for {languages[0]}. Fix: corpus.quality = '
            '"none"'
        )
    if not is_cut and not language(languages[0]).has_spaces:
        raise KieloError(
            f'corpus.quality = "fineweb2": {languages[0]} is written without spaces between words, which the '
            'filters count. Fix: corpus.words = "icu"'
        )
    return found


@cache
def known_limits(code: str) -> QualityLimits | None:
    return QualityLimits(**_rows()[code]) if code in _rows() else None
