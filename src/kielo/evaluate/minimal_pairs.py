"""Minimal pairs of a decoder: the share of pairs whose good sentence has the larger log-likelihood.

A sentence begins as the harness of EleutherAI begins it (task `blimp`): the start token, a space, the
sentence, and no end of text. So every token of the sentence counts once, given the tokens before it. The
start token is `first_ids` of the contender, else its `start_id`.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kielo.artifact.scores import MadePairScores, MinimalPairScores, PairAccuracy
from kielo.evaluate.contender import MOST_LOGITS_PER_FORWARD, Contender, token_stream_bits
from kielo.evaluate.encoder import by_length
from kielo.evaluate.made_pairs import MadePairs
from kielo.evaluate.pair_files import Pair, pair_scores
from kielo.tokenizer.load import encode, vocabulary_size

MADE_FILE = "made_pairs.jsonl"


def score_pairs(contender: Contender, pairs: Sequence[Pair], file: str) -> MinimalPairScores:
    """Score a decoder on the pairs of a file."""
    return _scores(pairs, *pair_likelihoods(contender, pairs), file)


def score_made_pairs(
    contender: Contender, made: MadePairs, wanted: int, folder: Path | None
) -> MadePairScores:
    """Score a decoder on made pairs, and write them with their nats into `folder`, if it is given."""
    nats, tokens = pair_likelihoods(contender, made.pairs)
    if folder is not None:
        lines = [
            json.dumps(
                {
                    "phenomenon": pair.group,
                    "sentence_good": pair.good,
                    "sentence_bad": pair.bad,
                    "nats_good": round(good, 4),
                    "nats_bad": round(bad, 4),
                },
                ensure_ascii=False,
            )
            for pair, (good, bad) in zip(made.pairs, nats.tolist(), strict=True)
        ]
        (folder / MADE_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    scores = _scores(made.pairs, nats, tokens, MADE_FILE)
    return MadePairScores(
        **scores.content(), wanted=wanted, sentences=made.num_sentences, in_training=made.num_in_training
    )


def _scores(pairs: Sequence[Pair], nats: np.ndarray, tokens: np.ndarray, file: str) -> MinimalPairScores:
    is_right = nats[:, 0] > nats[:, 1]
    is_shorter = (1 + np.sign(tokens[:, 1] - tokens[:, 0])) / 2
    return pair_scores(file, pairs, lambda which: _accuracy(is_right[which], is_shorter[which]))


def pair_likelihoods(contender: Contender, pairs: Sequence[Pair]) -> tuple[np.ndarray, np.ndarray]:
    """Return the nats and the tokens of the good and the bad sentence of each pair, each [pairs, 2].

    Sentences of one length are computed together, so there is no padding. Ranks that call this with the same
    pairs compute the same batches in the same order. Sentences longer than a sequence have overlapping
    windows, as in bits per byte.
    """
    first = contender.first_ids or (contender.start_id,)
    number_of = {
        sentence: n for n, sentence in enumerate(dict.fromkeys(s for pair in pairs for s in pair[:2]))
    }
    rows = [[*first, *ids] for ids in encode(contender.tokenizer, [f" {one}" for one in number_of])]
    nats = np.zeros(len(rows))
    for together in by_length(len(rows), lambda number: len(rows[number])):
        if len(rows[together[0]]) - 1 <= contender.sequence_length:
            nats[together] = _sums(contender, [rows[number] for number in together], len(first))
        else:
            nats[together] = [_in_windows(contender, rows[number], len(first)) for number in together]
    numbers = np.array([[number_of[pair.good], number_of[pair.bad]] for pair in pairs])
    return nats[numbers], np.array([len(row) - len(first) for row in rows])[numbers]


@torch.inference_mode()
def _sums(contender: Contender, rows: Sequence[Sequence[int]], begin: int) -> list[float]:
    """Return the nats of the tokens from place `begin` on, of rows of one length."""
    length = len(rows[0])
    if length <= begin:  # a tokenizer can turn a text into no token
        return [0.0] * len(rows)
    step = max(1, MOST_LOGITS_PER_FORWARD // vocabulary_size(contender.tokenizer) // length)
    sums: list[float] = []
    for start in range(0, len(rows), step):
        tokens = torch.tensor(rows[start : start + step], device=contender.device)
        inputs, labels = tokens[:, :-1], tokens[:, begin:]
        logits = contender.logits(inputs, contender.documents(inputs))[:, begin - 1 :].float()
        nats = torch.log_softmax(logits, dim=-1).gather(2, labels[:, :, None])[:, :, 0]
        sums += nats.double().sum(dim=1).tolist()
    return sums


def _in_windows(contender: Contender, row: Sequence[int], begin: int) -> float:
    tokens = np.array(row if contender.first_ids else row[1:], np.int64)
    is_counted = np.arange(len(tokens)) >= begin - (len(row) - len(tokens))
    return -token_stream_bits(contender, tokens, counted=is_counted) * math.log(2)


def _accuracy(is_right: np.ndarray, is_shorter: np.ndarray) -> PairAccuracy:
    share, pairs = float(is_right.mean()), len(is_right)
    error = math.sqrt(share * (1 - share) / pairs)
    fewer_tokens = float(is_shorter.mean())
    return PairAccuracy(pairs=pairs, likelihood=share, standard_error=error, fewer_tokens=fewer_tokens)
