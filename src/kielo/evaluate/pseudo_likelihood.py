"""Likelihoods of an encoder: of texts, token by token, and of the sentences of minimal pairs.

Pseudo-log-likelihood: each token of a text is hidden in turn, and predicted from all the others. Salazar et
al. 2020 (arXiv:1910.14659) hide one token at a time. In a word of several tokens the other tokens give the
hidden token away. So Kauf and Ivanova 2023 (arXiv:2305.10588) also hide the later tokens of its word
("within-word left-to-right"). Shape letters: n = tokens of a text, s = with the control tokens.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kielo.artifact.scores import MinimalPairScores, PairAccuracy, PseudoBitsPerByte
from kielo.evaluate.encoder import Encoder, by_length
from kielo.evaluate.texts import text_lines
from kielo.recipe.errors import KieloError


def pseudo_log_likelihoods(
    encoder: Encoder, texts: Sequence[Sequence[int]], within_word: bool = False
) -> list[np.ndarray]:
    """Return for each text the nats of its tokens, float64 [n], each given all tokens but the hidden ones.

    texts: ids without control tokens, at most `encoder.most_tokens` each.
    """
    found = [np.zeros(len(ids)) for ids in texts]
    for together in by_length(len(texts), lambda one: len(texts[one]), lambda one: max(1, len(texts[one]))):
        inputs = np.concatenate([hidden_in_turn(encoder, texts[one], within_word) for one in together])
        places = np.concatenate([np.arange(len(texts[one])) for one in together]) + len(encoder.first)
        labels = np.concatenate([np.asarray(texts[one], np.int64) for one in together])
        values = _log_probabilities(encoder, inputs, places, labels)
        for one, part in zip(together, np.split(values, len(together)), strict=True):
            found[one] = part
    return found


def hidden_in_turn(encoder: Encoder, ids: Sequence[int], within_word: bool) -> np.ndarray:
    """Return a text once for each of its tokens, with that token hidden, int64 [n, s].

    With `within_word` the later tokens of its word are hidden too.
    """
    sequence, first = encoder.sequence(ids), len(encoder.first)
    tokens = np.asarray(ids, np.int64)
    rows = np.repeat(sequence[None], len(tokens), axis=0)
    is_hidden = np.eye(len(tokens), dtype=bool)
    if within_word:
        word = np.cumsum(np.r_[False, ~encoder.pieces.go_on(tokens[None])[0]][: len(tokens)])
        is_hidden = np.triu(word[:, None] == word[None])
    rows[:, first : first + len(tokens)][is_hidden] = encoder.mask_id
    return rows


def pseudo_bits_per_byte(encoder: Encoder, documents: Sequence[str], num_tokens: int) -> PseudoBitsPerByte:
    """Score the beginnings of documents, in their order, until `num_tokens` tokens are hidden in turn.

    Raise KieloError if no document has a token.
    """
    texts, rows, counted = [], [], 0
    for document in documents:
        if counted >= num_tokens:
            break
        text = encoder.beginning(document)
        (ids,) = encoder.encode([text])
        if ids:
            texts.append(text)
            rows.append(ids)
            counted += len(ids)
    if not texts:
        raise KieloError("the held-out documents have no token to hide")
    num_bytes = sum(len(text.encode("utf-8")) for text in texts)
    token, within_word = (
        -sum(float(one.sum()) for one in pseudo_log_likelihoods(encoder, rows, way)) for way in (False, True)
    )
    return PseudoBitsPerByte(
        token=token / math.log(2) / num_bytes,
        within_word=within_word / math.log(2) / num_bytes,
        perplexity=math.exp(token / counted),
        texts=len(texts),
        tokens=counted,
        bytes=num_bytes,
    )


def _log_probabilities(
    encoder: Encoder, inputs: np.ndarray, places: np.ndarray, labels: np.ndarray
) -> np.ndarray:
    """Return the nats of a label at a place of each sequence, float64 [rows]."""
    found = np.zeros(len(labels))
    step = encoder.rows_at_once(inputs.shape[1])
    for start in range(0, len(labels), step):
        part = slice(start, start + step)
        nats = torch.log_softmax(encoder.logits_at(inputs[part], places[part]), dim=-1).cpu()
        found[part] = nats.gather(1, torch.from_numpy(labels[part])[:, None])[:, 0].double().numpy()
    return found


# Names of the good and the bad sentence, in BLiMP and MultiBLiMP, and of a pair's phenomenon.
SENTENCES = (("sentence_good", "sentence_bad"), ("sen", "wrong_sen"))
GROUPS = ("phenomenon", "UID")
_FORM = (
    "a .jsonl with an object a line, or a .tsv with a line of names, that have sentence_good and "
    "sentence_bad (or sen and wrong_sen), and may have a phenomenon"
)


class Pair(NamedTuple):
    good: str
    bad: str
    group: str  # their phenomenon, "" if the file does not name it


def read_pairs(path: Path) -> list[Pair]:
    """Read the pairs of a file. Raise KieloError, with file and line, for a malformed pair."""
    pairs = []
    for number, row in _rows(path):
        names = next((names for names in SENTENCES if all(name in row for name in names)), None)
        if names is None or not all(isinstance(row[name], str) and row[name].strip() for name in names):
            raise KieloError(f"{path}, line {number}: not a minimal pair. Fix: {_FORM}")
        group = next((row[name] for name in GROUPS if row.get(name)), "")
        pairs.append(Pair(row[names[0]].strip(), row[names[1]].strip(), str(group)))
    if not pairs:
        raise KieloError(f"{path}: has no minimal pair. Fix: {_FORM}")
    return pairs


def score_minimal_pairs(encoder: Encoder, path: Path) -> MinimalPairScores:
    """Score how often an encoder finds the good sentence of a pair likelier, by sums over tokens.

    Raise KieloError for a sentence that is longer than a sequence.
    """
    pairs = read_pairs(path)
    sentences = [sentence for pair in pairs for sentence in (pair.good, pair.bad)]
    rows = encoder.encode(sentences)
    for sentence, row in zip(sentences, rows, strict=True):
        if len(row) > encoder.most_tokens:
            raise KieloError(
                f"{path}: a sentence has {len(row)} tokens and a sequence {encoder.most_tokens}: "
                f"{sentence[:60]!r}. Fix: a file without such pairs, or a model of a longer "
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
    names: list[str] = []
    for number, line in text_lines(path):
        if not line.strip():
            continue
        if path.suffix == ".tsv":
            cells = line.split("\t")
            if names:
                yield number, dict(zip(names, cells, strict=False))
            names = names or cells
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise KieloError(f"{path}, line {number}: not JSON ({error}). Fix: {_FORM}") from None
        yield number, row if isinstance(row, dict) else {}
