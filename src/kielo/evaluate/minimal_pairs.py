"""Minimal pairs: a file of a good and a bad sentence each → how often an encoder finds the good one likelier.

Sentences are compared by their pseudo-log-likelihoods (`pseudo_likelihood.py`), which are sums over tokens.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kielo.artifact.masked_scores import MinimalPairScores, PairAccuracy
from kielo.evaluate.encoder import Encoder
from kielo.evaluate.pseudo_likelihood import pseudo_log_likelihoods
from kielo.recipe.errors import KieloError

# Names of the good and the bad sentence: BLiMP's and MultiBLiMP's. Those of what a pair is about.
SENTENCES = (("sentence_good", "sentence_bad"), ("sen", "wrong_sen"))
GROUPS = ("phenomenon", "UID")
_FORM = (
    "a .jsonl with an object a line, or a .tsv with a line of names, that have sentence_good and "
    "sentence_bad (or sen and wrong_sen), and may have a phenomenon"
)


class Pair(NamedTuple):
    """A good and a bad sentence; group: what they are about, "" where the file does not say it."""

    good: str
    bad: str
    group: str


def read_pairs(path: Path) -> list[Pair]:
    """Reads the pairs of a file. Raises KieloError, with file and line, for what is none."""
    pairs = []
    for number, row in _rows(path):
        names = next((names for names in SENTENCES if all(name in row for name in names)), None)
        if names is None or not all(isinstance(row[name], str) and row[name].strip() for name in names):
            raise KieloError(f"{path}, line {number}: not a minimal pair; what would work: {_FORM}")
        group = next((row[name] for name in GROUPS if row.get(name)), "")
        pairs.append(Pair(row[names[0]].strip(), row[names[1]].strip(), str(group)))
    if not pairs:
        raise KieloError(f"{path}: holds no minimal pair; what would work: {_FORM}")
    return pairs


def score_minimal_pairs(encoder: Encoder, path: Path) -> MinimalPairScores:
    """Scores the pairs of a file. Raises KieloError for a sentence that is longer than a sequence."""
    pairs = read_pairs(path)
    sentences = [sentence for pair in pairs for sentence in (pair.good, pair.bad)]
    rows = encoder.encode(sentences)
    for sentence, row in zip(sentences, rows, strict=True):
        if len(row) > encoder.most_tokens:
            raise KieloError(
                f"{path}: a sentence has {len(row)} tokens and a sequence {encoder.most_tokens}: "
                f"{sentence[:60]!r}; what would work: a file without such pairs, or a model of a longer "
                "dataset.sequence_length"
            )
    is_right = {}
    for name, within_word in (("token", False), ("within_word", True)):
        nats = [float(one.sum()) for one in pseudo_log_likelihoods(encoder, rows, within_word)]
        is_right[name] = np.array(nats[::2]) > np.array(nats[1::2])
    groups = dict.fromkeys(pair.group for pair in pairs if pair.group)
    of_group = {group: np.array([pair.group == group for pair in pairs]) for group in groups}
    return MinimalPairScores(
        file=path.name,
        all=_accuracy(is_right, np.ones(len(pairs), bool)),
        groups={group: _accuracy(is_right, which) for group, which in of_group.items()},
    )


def _accuracy(is_right: dict[str, np.ndarray], which: np.ndarray) -> PairAccuracy:
    shares = {name: float(right[which].mean()) for name, right in is_right.items()}
    return PairAccuracy(pairs=int(which.sum()), **shares)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line, its fields)."""
    names: list[str] = []
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            try:
                line = data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise KieloError(f"{path}, line {number}: not UTF-8 ({error.reason})") from None
            if not line.strip():
                continue
            if path.suffix == ".tsv":
                cells = line.rstrip("\r\n").split("\t")
                if names:
                    yield number, dict(zip(names, cells))
                names = names or cells
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise KieloError(
                    f"{path}, line {number}: not JSON ({error}); what would work: {_FORM}"
                ) from None
            yield number, row if isinstance(row, dict) else {}
