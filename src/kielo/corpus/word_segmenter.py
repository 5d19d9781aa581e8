"""Words of text without spaces between them: Chinese, Japanese, Thai, Lao, Khmer and Burmese.

ICU finds them by its dictionaries (Unicode Standard Annex 29, section 4, and ICU's break engines). A run of
letters of other scripts stays whole, so that other languages have the same words with and without ICU.
"""

import regex

from kielo.corpus.step import CutWords
from kielo.recipe.errors import KieloError

_WITHOUT_SPACES = regex.compile(
    r"[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}"
    r"\p{Script=Myanmar}]"
)
# Its rules differ between locales for sentences and lines alone.
_LOCALE = "en"


def cutter_of_words(words: str) -> CutWords | None:
    """Return what cuts the runs of letters of a line into words, by the recipe's corpus.words.

    None if they are words already. Raises KieloError without the package.
    """
    if words == "letters":
        return None
    try:
        from icu4py.breakers import WordBreaker
    except ImportError:
        raise KieloError(
            'corpus.words = "icu" needs the package icu4py. Fix: pip install "kielo[segmentation]"'
        ) from None

    def cut(found: list[str]) -> list[str]:
        if not any(map(_WITHOUT_SPACES.search, found)):
            return found
        return [
            word
            for run in found
            for word in (WordBreaker(run, _LOCALE) if _WITHOUT_SPACES.search(run) else (run,))
        ]

    return cut
