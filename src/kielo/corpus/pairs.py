"""Steps of parallel text: each side is cleaned and identified by itself, then both are laid out as one text.

Pairs (`SplitDocument.sides`) → documents. A pair is kept or dropped whole.
"""

from collections.abc import Sequence

import xxhash

from kielo.corpus.language_identification import NOT_SURE, LanguageFilter
from kielo.corpus.normalise import count_c1, normalise_line
from kielo.corpus.step import CorpusStep, DocumentFilter, LanguageRule, SplitDocument, lines_of
from kielo.recipe.source_kinds import fill

# Shorter texts say too little for an identifier (benchmarks/log/2026-11.md).
MIN_IDENTIFIED_CHARACTERS = 30
DRAW = 18  # seed of the choice of layouts


class NormaliseSides(CorpusStep):
    """Bring both sides to the normal form of text; a side may have several lines."""

    name = "normalise pairs"

    def work(self, document: SplitDocument) -> bool:
        before, (first, second) = document.num_bytes, document.pair()
        count_c1(self, first + second)
        document.set_sides((_normal_form(first), _normal_form(second)))
        self.count("bytes", "white space and control characters", before - document.num_bytes)
        return True


class WholePairs(DocumentFilter):
    """Drop pairs with an empty side, and those that were copied and not translated."""

    name = "pairs"

    def judge(self, document: SplitDocument) -> str | None:
        first, second = (side.strip() for side in document.pair())
        count_c1(self, first + second, "c1_kept")  # of pairs that are not cleaned
        if not (first and second):
            return "a side is empty"
        return "both sides are the same" if first == second else None


class SideLanguage(LanguageFilter, DocumentFilter):
    """Drop pairs one side of which looks like another language.

    Sides are single sentences, of which an identifier is seldom sure: its best guess is enough, for the other
    side speaks for the pair too. Very short sides are taken on trust.
    """

    name = "pair language"

    def __init__(self, identifier: str, rule: LanguageRule, side: int):
        super().__init__(identifier, rule.identifier_codes, rule.line_threshold)
        self.side = side

    def judge(self, document: SplitDocument) -> str | None:
        text = document.pair()[self.side]
        if len(text) < MIN_IDENTIFIED_CHARACTERS:
            return None
        found = self.verdict(text, len(text.encode()))
        return None if found == NOT_SURE else found


class LayOutPairs(CorpusStep):
    """Make one text of each pair, by one of the templates and in one of both directions.

    Which ones follows from the sides alone: so it is the same for any number of workers, and a run with
    another seed reads the same corpus.
    """

    name = "lay out pairs"

    def __init__(self, templates: Sequence[str], reverse_share: float, languages: Sequence[str]):
        super().__init__()
        self.templates, self.reverse_share = tuple(templates), reverse_share
        self.languages = tuple(languages)

    def work(self, document: SplitDocument) -> bool:
        drawn = xxhash.xxh3_64_intdigest("\0".join(document.pair()).encode(), seed=DRAW)
        template = self.templates[drawn % len(self.templates)]
        pairs = list(zip(document.pair(), self.languages, strict=True))
        if (drawn >> 32) < self.reverse_share * 2**32:
            pairs.reverse()
        (source, source_language), (target, target_language) = pairs
        values = {"source": source, "target": target}
        values |= {"source_language": source_language, "target_language": target_language}
        document.sides = None
        document.set_lines(fill(template, values).split("\n"))
        return True


def _normal_form(side: str) -> str:
    return "\n".join(filter(None, map(normalise_line, lines_of(side))))
