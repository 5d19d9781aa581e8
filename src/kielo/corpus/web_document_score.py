"""HPLT's score of web documents (WDS), by the program that HPLT publishes, and a filter with its threshold.

The score is from 0 to 1, by the lengths of lines, repeated lines, signs, numbers, addresses and how far the
text can be compressed, beside what is usual in the language. HPLT calls documents good from 0.5 on.
The program (docscorer, GPL-3.0) is installed by who wants it: https://github.com/pablop16n/web-docs-scorer
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from kielo.corpus.step import DocumentFilter, SplitDocument
from kielo.recipe.errors import KieloError

LEAST_SCORE = 0.5
# The program has no release on PyPI.
_COMMIT = "743d13184d704b264556c805512fb252e4f4a2b9"


@cache
def scorer() -> Any:
    """Load the program once in a process. Raises KieloError without it."""
    try:
        from docscorer.configuration import ScorerConfiguration
        from docscorer.docscorer import DocumentScorer
    except ImportError as problem:
        raise KieloError(
            f'corpus.quality = "hplt" needs HPLT\'s docscorer ({problem}). Fix: pip install '
            f'"docscorer @ git+https://github.com/pablop16n/web-docs-scorer@{_COMMIT}"'
        ) from None
    return DocumentScorer(ScorerConfiguration())


@dataclass
class WebDocumentScore(DocumentFilter):
    """A filter of documents by their score. names: of the language, as est_Latn, of which the scorer has one.

    Lines in other languages are gone already, so each line counts as the language's.
    """

    name = "quality"
    names: Sequence[str]

    def __post_init__(self) -> None:
        self._scorer = scorer()
        measured, known = self._scorer.config.LANGUAGES, self._scorer.config.modeled_punctuation
        # By its data of the language, else of related languages, else of the script.
        name = min(self.names, key=lambda one: (one[:3] not in measured, one.lower() not in known))
        self._language, _, self._script = name.partition("_")

    def score(self, text: str) -> float:
        of_lines = [f"{self._language}_{self._script}"] * (text.count("\n") + 1)
        return self._scorer.score_document(self._language, self._script, of_lines, text, "", raw_score=True)

    def judge(self, document: SplitDocument) -> str | None:
        is_low = self.score(document.join()) < LEAST_SCORE
        return f"web document score under {LEAST_SCORE}" if is_low else None
