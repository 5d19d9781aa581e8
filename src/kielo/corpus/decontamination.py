"""A filter of documents that share words in a row with an evaluation, as GPT-3 and FineWeb have it.

N-grams of 13 words, of lower-cased words without signs (Brown et al. 2020, arXiv:2005.14165, appendix C). A
shorter text of the evaluation is looked for whole, from 8 words. In scripts without spaces a character is a
word. N-grams are compared by 64-bit hashes. numpy is loaded when a recipe asks for it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from unicodedata import is_normalized, normalize

import regex
import xxhash

from kielo.corpus.evaluation_items import EvaluationItems, evaluation_items
from kielo.corpus.filters import normalise_line
from kielo.corpus.input_files import known_hash
from kielo.corpus.step import CorpusStep, DocumentFilter, SplitDocument, cut_tokens, lines_of
from kielo.recipe.sections import Recipe

NUM_WORDS, LEAST_WORDS = 13, 8
Numbers = Any  # an array of numpy
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no word's hash is lost
_NUM_REMEMBERED = 500_000  # words whose hash a worker remembers
_CHARACTERS = regex.compile(
    r"[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}"
    r"\p{Script=Myanmar}]"
)


# A word is the same with any apostrophe: typewriter's, printed, and the modifier letters.
_WITHOUT_APOSTROPHES = str.maketrans("", "", "'’ʼʻ")
# Other signs that stand for an apostrophe between letters. Ligatures, forms of Arabic letters, and full-width
# letters and digits.
_SIGNS = "´‘`′＇"
_FORMS = r"\uFB00-\uFDFF\uFE70-\uFEFC\uFF10-\uFF19\uFF21-\uFF3A\uFF41-\uFF5A\uFF66-\uFFDC"
_OTHER_FORMS = regex.compile(rf"[{_SIGNS}](?<=[\p{{L}}\p{{M}}].)(?=\p{{L}})|[{_FORMS}]+")
_MAY_BE_OTHER = re.compile(f"[{_SIGNS}{_FORMS}]")  # which `re` finds ten times as fast


class _Hashes(dict[str, int]):
    def __missing__(self, word: str) -> int:
        if len(self) >= _NUM_REMEMBERED:
            self.clear()
        plain = word.lower().translate(_WITHOUT_APOSTROPHES)
        self[word] = found = xxhash.xxh3_64_intdigest(plain.encode())
        return found


_HASHES = _Hashes()


class NGrams(NamedTuple):
    """N-grams of one length: sorted hashes, and for each the number of its evaluation."""

    hashes: Numbers
    owners: Numbers


def _plain_tokens(lines: Sequence[str]) -> list[str]:
    """Return the words and signs of lines in the normal form, which documents of others may lack."""
    return cut_tokens(_OTHER_FORMS.sub(_usual_form, "\n".join(map(normalise_line, lines))))


def _usual_form(found: regex.Match) -> str:
    return "'" if found[0] in _SIGNS else normalize("NFKC", found[0])


def _is_plain(line: str) -> bool:
    return line.isprintable() and is_normalized("NFC", line) and not _MAY_BE_OTHER.search(line)


def _words(tokens: Sequence[str]) -> Iterator[str]:
    for token in tokens:
        if _CHARACTERS.search(token):
            yield from filter(str.isalnum, token)
        elif token[0].isalnum():
            yield token


def _hashes(words: Sequence[str], most: int = NUM_WORDS) -> Iterator[tuple[int, Numbers]]:
    """Yield n and the hashes of all n-grams, from LEAST_WORDS to `most` words."""
    import numpy as np

    factor = np.uint64(_FACTOR)
    of_words = np.fromiter(map(_HASHES.__getitem__, words), np.uint64, len(words))
    hashes = of_words
    for n in range(2, min(most, len(words)) + 1):
        hashes = hashes[:-1] * factor + of_words[n - 1 :]
        if n >= LEAST_WORDS:
            yield n, hashes


def ngrams_of(items: tuple[EvaluationItems, ...]) -> tuple[dict[int, NGrams], tuple[tuple[int, int], ...]]:
    """Return length → n-grams, and for each evaluation its texts and how many are too short."""
    return _ngrams_of(items, tuple(known_hash(path) for one in items for path in one.files))


@lru_cache(maxsize=1)
def _ngrams_of(
    items: tuple[EvaluationItems, ...], of_files: tuple[str, ...]
) -> tuple[dict[int, NGrams], tuple[tuple[int, int], ...]]:
    import numpy as np

    found: dict[int, list[tuple[Numbers, int]]] = {}
    counts = []
    for owner, one in enumerate(items):
        texts = short = 0
        for text in one.texts():
            words = list(_words(_plain_tokens(lines_of(text))))
            if not words:
                continue
            texts += 1
            short += len(words) < LEAST_WORDS
            length = min(len(words), NUM_WORDS)
            for n, hashes in _hashes(words):
                if n == length:
                    found.setdefault(n, []).append((hashes, owner))
        counts.append((texts, short))
    ngrams = {}
    for n, parts in sorted(found.items()):
        hashes = np.concatenate([part for part, _ in parts])
        owners = np.repeat(
            np.array([owner for _, owner in parts], np.int32), [len(part) for part, _ in parts]
        )
        unique, places = np.unique(hashes, return_index=True)  # the first evaluation of equal n-grams
        ngrams[n] = NGrams(unique, owners[places])
    return ngrams, tuple(counts)


def described(items: Sequence[EvaluationItems]) -> str:
    """Return, in words, how many texts of each evaluation are looked for."""
    _, counts = ngrams_of(tuple(items))
    return ", ".join(
        f"{texts - short:,} of {texts:,} texts of {one.name}"
        for one, (texts, short) in zip(items, counts, strict=True)
    )


def decontamination(recipe: Recipe) -> list[CorpusStep]:
    items = evaluation_items(recipe)
    return [Decontaminate(tuple(items))] if items else []


@dataclass
class Decontaminate(DocumentFilter):
    name = "decontaminate"
    items: tuple[EvaluationItems, ...]

    def __post_init__(self) -> None:
        self._ngrams, _ = ngrams_of(self.items)

    def judge(self, document: SplitDocument) -> str | None:
        is_plain = all(map(_is_plain, document.lines))
        words = list(_words(document.tokens() if is_plain else _plain_tokens(document.lines)))
        owners = [owner for n, hashes in _hashes(words) if (owner := self._owner(n, hashes)) is not None]
        return f"words of {self.items[min(owners)].name}" if owners else None

    def _owner(self, n: int, hashes: Numbers) -> int | None:
        import numpy as np

        if n not in self._ngrams:
            return None
        known, owners = self._ngrams[n]
        places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
        matching = owners[places[known[places] == hashes]]
        return int(matching.min()) if len(matching) else None
