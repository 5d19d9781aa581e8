"""Masked tokens as an objective: a batch of whole sequences → some tokens hidden, and those as labels.

The hidden tokens follow from the seed, the sample's number and the masking rate alone, so every number of
ranks, every layout and every resumed run has the same masks. Numbers are SplitMix64's finaliser
(`order.scramble`) of the sample's key, the stream and the place.

The recipe of HPLT's encoders (de Gibert et al. 2024, arXiv:2403.14009), after BERT (Devlin et al. 2019,
arXiv:1810.04805) and SpanBERT (Joshi et al. 2020, arXiv:1907.10529): a sequence is divided into spans, each
span draws a number, and spans below the rate are hidden. Of hidden spans 80 % become mask tokens, 10 % random
tokens, and 10 % stay. Control tokens are never hidden.

The hybrid objective of GPT-BERT (Charpentier and Samuel 2024, arXiv:2410.24159): a share of the sequences is
causal, with nothing hidden and the next tokens as labels. In the others each hidden token is the label of the
position before it, so every output is about the next token. Each label counts the same.

Shape letters: n = sequences, s = tokens of a sequence, v = vocabulary.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kielo.dataset.batches import NOT_COUNTED, Batch, causal_documents
from kielo.dataset.order import key_from, keys_of_epochs, scramble
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import MaskingKind
from kielo.tokenizer.control_tokens import control_tokens
from kielo.tokenizer.load import CONFIG_FILE, load_tokenizer, role_id, vocabulary_size
from kielo.tokenizer.spelling import WordPieces, word_pieces

RANDOM_SHARE, KEPT_SHARE = 0.1, 0.1  # of hidden spans
# Lengths of spans: geometric with this probability, modulo 11, at least 1.
_STOPS, _MODULUS = 0.2, 11
_LENGTHS, _SPANS, _ACTIONS, _TOKENS, _CAUSAL = range(5)  # streams of numbers
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class MaskingVocabulary:
    mask_id: int
    is_control: np.ndarray  # bool [v]
    ordinary_ids: np.ndarray  # int64, which random tokens are drawn from
    pieces: WordPieces | None = None  # only for whole words


def masking_vocabulary(folder: Path | str, kind: MaskingKind) -> MaskingVocabulary:
    """Read the facts of the tokenizer in `folder`. Raises KieloError if it has no mask token."""
    tokenizer = load_tokenizer(folder)
    mask_id = role_id(tokenizer, "mask_token")
    if mask_id is None:
        raise KieloError(
            f'{folder}: this tokenizer has no mask token, which train.objective = "masked_tokens" needs. '
            f"Fix: name one of its special tokens as mask_token in {CONFIG_FILE}"
        )
    vocabulary = tokenizer.whole.get_vocab(with_added_tokens=True)
    control = control_tokens(tokenizer.folder, tokenizer.end_of_text) & vocabulary.keys()
    is_control = np.zeros(vocabulary_size(tokenizer), bool)
    is_control[[vocabulary[token] for token in control]] = True
    has_token = np.zeros_like(is_control)
    has_token[list(vocabulary.values())] = True
    pieces = word_pieces(tokenizer) if kind == "whole_word" else None
    return MaskingVocabulary(mask_id, is_control, np.flatnonzero(has_token & ~is_control), pieces)


class Masking:
    """Hides tokens of batches. `causal_share` is the share of causal sequences (hybrid objective)."""

    def __init__(
        self, seed: int, kind: MaskingKind, vocabulary: MaskingVocabulary, causal_share: float = 0.0
    ):
        self._key = np.uint64(key_from(seed, "masking"))
        self._kind, self._vocabulary, self._causal_share = kind, vocabulary, causal_share

    def training_batch(self, batch: Batch, rate: float) -> Batch:
        """Return the batch to train on. Documents of causal sequences have negative numbers."""
        hidden = self.hide(batch, rate)
        if not self._causal_share:
            return hidden
        keys = keys_of_epochs(self._key, batch.samples)
        is_causal_n1 = _uniform(keys, _CAUSAL, 1) < self._causal_share
        labels = np.full_like(hidden.labels, NOT_COUNTED)
        labels[:, :-1] = hidden.labels[:, 1:]
        documents = np.zeros(batch.inputs.shape, np.int32) if batch.documents is None else batch.documents
        return replace(
            hidden,
            inputs=np.where(is_causal_n1, batch.inputs, hidden.inputs),
            labels=np.where(is_causal_n1, batch.labels, labels),
            documents=np.where(is_causal_n1, causal_documents(documents), documents),
        )

    def hide(self, batch: Batch, rate: float) -> Batch:
        """Return the batch with tokens hidden. Labels are the hidden tokens, and -100 elsewhere.

        batch: inputs and next-token labels [n, s]. A token whose label does not count is never hidden, nor a
        first token without loss. rate: share of the spans. At least one span of a sequence is hidden. With
        causal sequences the first token is never hidden, because no position before it could predict it.
        """
        tokens, vocabulary = batch.inputs, self._vocabulary
        may_hide = ~vocabulary.is_control[tokens]
        may_hide[:, 1:] &= batch.labels[:, :-1] != NOT_COUNTED
        if batch.first_counts is not None:
            may_hide[:, 0] &= batch.first_counts
        if self._causal_share:
            may_hide[:, 0] = False
        keys = keys_of_epochs(self._key, batch.samples)
        span = self._spans(tokens, keys)
        draw, action = (
            np.take_along_axis(_uniform(keys, stream, tokens.shape[1]), span, axis=1)
            for stream in (_SPANS, _ACTIONS)
        )
        smallest = np.where(may_hide, draw, np.inf).min(axis=1, keepdims=True)
        is_hidden = may_hide & (draw < np.maximum(rate, np.nextafter(smallest, np.inf)))
        is_random, is_kept = action < RANDOM_SHARE, action >= 1 - KEPT_SHARE
        ordinary = vocabulary.ordinary_ids
        which = (_uniform(keys, _TOKENS, tokens.shape[1]) * len(ordinary)).astype(np.int64)
        hidden = np.where(is_random, ordinary[which], np.where(is_kept, tokens, vocabulary.mask_id))
        return replace(
            batch, inputs=np.where(is_hidden, hidden, tokens), labels=np.where(is_hidden, tokens, NOT_COUNTED)
        )

    def _spans(self, tokens: np.ndarray, keys: np.ndarray) -> np.ndarray:
        num_rows, length = tokens.shape
        if self._kind == "subword":
            return np.broadcast_to(np.arange(length), tokens.shape)
        begins = np.zeros((num_rows, length), bool)
        if self._kind == "whole_word":
            if self._vocabulary.pieces is None:
                raise ValueError("whole words need the pieces of a vocabulary")
            begins[:, 1:] = ~self._vocabulary.pieces.go_on(tokens)
        else:
            ends = np.cumsum(span_lengths(_uniform(keys, _LENGTHS, length)), axis=1)
            row, _ = np.nonzero(ends < length)
            begins[row, ends[ends < length]] = True
        return np.cumsum(begins, axis=1)


def masking_rate(first: float, last: float, step: int, total_steps: int) -> float:
    return first + (last - first) * (step - 1) / max(total_steps - 1, 1)


def _uniform(keys: np.ndarray, stream: int, length: int) -> np.ndarray:
    """Return numbers in [0, 1), float64 [n, s]. keys: uint64 [n], of the samples."""
    counters = (np.uint64(stream) << np.uint64(32)) + np.arange(1, length + 1, dtype=np.uint64)
    return (scramble(keys[:, None] + counters * _GOLDEN) >> np.uint64(11)) * 2.0**-53


def span_lengths(draws: np.ndarray) -> np.ndarray:
    """Return lengths of 1 to 10 from uniform numbers, by the inverse of their distribution."""
    chances = (1 - _STOPS) ** np.arange(_MODULUS) * _STOPS / (1 - (1 - _STOPS) ** _MODULUS)
    chances[0] += chances[-1]  # a multiple of 11 becomes 0, and then 1
    return np.searchsorted(np.cumsum(chances[: _MODULUS - 2]), draws, side="right") + 1
