"""Likelihoods of an encoder: of texts, token by token, and of the sentences of minimal pairs.

Pseudo-log-likelihood: each token of a text is hidden in turn, and predicted from all the others. Salazar et
al. 2020 (arXiv:1910.14659) hide one token at a time. In a word of several tokens the other tokens give the
hidden token away. So Kauf and Ivanova 2023 (arXiv:2305.10588) also hide the later tokens of its word
("within-word left-to-right"). Shape letters: n = tokens of a text, s = with the control tokens.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kielo.artifact.scores import MinimalPairScores, PairAccuracy, PseudoBitsPerByte
from kielo.evaluate.encoder import Encoder, by_length
from kielo.evaluate.pair_files import pair_scores, read_pairs
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
    return pair_scores(path.name, pairs, lambda which: _accuracy(is_right, which))


def _accuracy(is_right: dict[str, np.ndarray], which: np.ndarray) -> PairAccuracy:
    shares = {name: float(right[which].mean()) for name, right in is_right.items()}
    return PairAccuracy(pairs=int(which.sum()), **shares)
