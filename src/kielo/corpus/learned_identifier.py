"""A language identifier that is learned from a person's own samples, for a language that no model knows.

Naive Bayes over character n-grams (Cavnar and Trenkle 1994; Lui and Baldwin 2011), n = 1 … 4, in lower case.
N-grams are counted by hash. Neighbouring n-grams overlap, so that their likelihoods count 1 / 4 each.
In: samples of the language and of the languages that its text is mixed with. Out: a file of one line of JSON
and a NumPy table, the same bytes for the same samples.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import regex

from kielo.artifact.durable import DurableFile
from kielo.recipe.errors import KieloError

if TYPE_CHECKING:  # numpy is loaded by those who use it: each worker of the corpus imports this file
    import numpy as np
    import numpy.typing as npt

FORMAT = "kielo language identifier 1"
_ORDERS, _BUCKETS, _LINES_AT_ONCE = 4, 1 << 16, 10_000
# Counted before every n-gram, so that an unseen n-gram is unlikely and not impossible.
_PRIOR = 0.05
_MULTIPLIER = 0x9E3779B1
_NO_LETTERS = regex.compile(r"[^\p{L}\p{M}]+")


class LearnedIdentifier:
    """codes: the languages. log_likelihoods: [languages, n-grams], float32."""

    def __init__(self, codes: Sequence[str], log_likelihoods: "npt.NDArray[np.float32]") -> None:
        self._codes, self._log_likelihoods = tuple(codes), log_likelihoods

    def codes(self) -> frozenset[str]:
        return frozenset(self._codes)

    def probabilities(self, text: str) -> dict[str, float]:
        import numpy as np

        if (hashed := _ngrams(text)).size == 0:
            return {}
        scores = self._log_likelihoods[:, hashed].sum(axis=1, dtype=np.float64) / _ORDERS
        likelihoods = np.exp(scores - scores.max())
        return dict(zip(self._codes, (likelihoods / likelihoods.sum()).tolist(), strict=True))

    def write(self, path: Path) -> None:
        head = json.dumps({"format": FORMAT, "codes": self._codes, "ngrams": _BUCKETS}, ensure_ascii=False)
        with DurableFile(path) as file:
            file.write(head.encode() + b"\n" + self._log_likelihoods.astype("<f2").tobytes())

    @classmethod
    def read(cls, path: Path) -> "LearnedIdentifier":
        """Read what `write` wrote. Raises KieloError for another file."""
        import numpy as np

        try:
            head, _, table = path.read_bytes().partition(b"\n")
        except OSError as error:
            raise KieloError(f"corpus.language_identifier, {path}: {error.strerror}") from None
        try:
            described = json.loads(head)
            if described["format"] != FORMAT:
                raise ValueError
            codes = [str(code) for code in described["codes"]]
            values = np.frombuffer(table, "<f2").reshape(len(codes), described["ngrams"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise KieloError(
                f"corpus.language_identifier, {path}: no whole file of `kielo languages --learn`. Fix: "
                "learn it again"
            ) from None
        return cls(codes, values.astype(np.float32))


def learn(samples: Mapping[str, Iterable[str]]) -> LearnedIdentifier:
    """Learn from code → lines. Every language weighs the same, whatever the size of its sample."""
    import numpy as np

    counts = np.full((len(samples), _BUCKETS), _PRIOR)
    for row, lines in enumerate(samples.values()):
        for some in _joined(lines):
            counts[row] += np.bincount(_ngrams(some), minlength=_BUCKETS)
    likelihoods = counts / counts.sum(axis=1, keepdims=True)
    return LearnedIdentifier(tuple(samples), np.log(likelihoods).astype("<f2").astype(np.float32))


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines joined, some at a time, because a table of counts is added for each."""
    remaining = iter(lines)
    while some := list(islice(remaining, _LINES_AT_ONCE)):
        yield "\n".join(some)


def _ngrams(text: str) -> "npt.NDArray[np.uint32]":
    """Return the hashes of the n-grams of all orders, with a space for each run that has no letter."""
    import numpy as np

    words = _NO_LETTERS.sub(" ", text.lower()).strip()
    if not words:
        return np.empty(0, np.uint32)
    letters = np.frombuffer(f" {words} ".encode("utf-32-le"), np.uint32)
    found, hashed = [], np.zeros(len(letters), np.uint32)
    for order in range(_ORDERS):
        hashed = (hashed[: len(letters) - order] ^ letters[order:]) * np.uint32(_MULTIPLIER)
        found.append((hashed >> np.uint32(16)) & np.uint32(_BUCKETS - 1))
    return np.concatenate(found)
