"""Quality of a tokenizer on a text: (tokenizer, texts) → figures.

Tokens per word (fertility: Rust et al. 2021, arXiv:2012.15613) and bytes per token say how long the text
becomes. The others say how well the vocabulary is used. Rényi efficiency (alpha 2.5) correlates with
downstream quality (Zouhar et al. 2023, arXiv:2306.16842), but ranks only vocabularies of equal size.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import regex

from kielo.recipe.errors import KieloError
from kielo.tokenizer.load import TextTokenizer, decode, encode, vocabulary_size
from kielo.tokenizer.spelling import BYTE_TOKEN

WORD = regex.compile(r"[\p{L}\p{M}\p{N}]+")
RENYI_ALPHA = 2.5
F95_PERCENT = 95
BATCH_TEXTS = 256


def measure(tokenizer: TextTokenizer, texts: Iterable[str]) -> dict[str, float | int]:
    """Measure `tokenizer` on `texts`, which it was not trained on.

    A word is a run of letters, marks and digits. single_byte_token_share is a share of the tokens written.
    renyi_efficiency is H_2.5 / ln V and shannon_efficiency H_1 / ln V, between 0 and 1. Raise KieloError if
    the texts have no token.
    """
    counts = np.zeros(vocabulary_size(tokenizer), dtype=np.int64)
    num_texts = words = characters = num_bytes = exact = 0
    for batch in batched(texts):
        rows = encode(tokenizer, batch)
        exact += sum(text == back for text, back in zip(batch, decode(tokenizer, rows), strict=True))
        for row in rows:
            counts += np.bincount(row, minlength=len(counts)) if row else 0
        num_texts += len(batch)
        words += sum(len(WORD.findall(text)) for text in batch)
        characters += sum(map(len, batch))
        num_bytes += sum(len(text.encode()) for text in batch)
    tokens = int(counts.sum())
    if not tokens:
        raise KieloError("no text was given to measure the tokenizer on")
    vocabulary = tokenizer.whole.get_vocab(with_added_tokens=True)
    size = tokenizer.whole.get_vocab_size(with_added_tokens=True)
    single_bytes = [vocabulary[one] for one in vocabulary if len(one) == 1 or BYTE_TOKEN.fullmatch(one)]
    return {
        "vocabulary_size": size,
        "tokens_per_word": tokens / max(words, 1),
        "bytes_per_token": num_bytes / tokens,
        "characters_per_token": characters / tokens,
        "exact_round_trip_share": exact / num_texts,
        "vocabulary_used_share": int(np.count_nonzero(counts)) / size,
        "single_byte_token_share": int(counts[single_bytes].sum()) / tokens,
        "renyi_efficiency": renyi_entropy(counts, RENYI_ALPHA) / float(np.log(size)),
        "shannon_efficiency": renyi_entropy(counts, 1.0) / float(np.log(size)),
        "f95": f95(counts, size),
        "texts": num_texts,
        "words": words,
        "bytes": num_bytes,
        "tokens": tokens,
    }


def renyi_entropy(counts: np.ndarray, alpha: float) -> float:
    """Compute the Rényi entropy ln(sum p^alpha) / (1 - alpha) in nats, Shannon's entropy at alpha 1."""
    shares = counts[counts > 0] / counts.sum()
    if alpha == 1.0:
        return float(-(shares * np.log(shares)).sum())
    return float(np.log((shares**alpha).sum()) / (1.0 - alpha))


def f95(counts: np.ndarray, size: int) -> int:
    """Return the occurrences of the rarest token among the 95 % most frequent of `size` tokens.

    counts: [vocabulary], in which gaps between ids are no tokens. Gowda and May 2020 (arXiv:2004.02334)
    advise the largest vocabulary with 100 or more in the text that the model is trained on.
    """
    ranked = np.sort(counts)[::-1]
    return int(ranked[-(-F95_PERCENT * size // 100) - 1])


def parity(tokenizer: TextTokenizer, texts: Sequence[str], english: Sequence[str]) -> dict[str, float | int]:
    """Compare texts with their English translations in tokens (Petrov et al. 2023, arXiv:2305.15425)."""
    if len(texts) != len(english):
        both = f"{len(texts)} texts and {len(english)} translations"
        raise KieloError(f"{both}. Fix: a translation of each text")
    ours, theirs = (
        sum(len(row) for batch in batched(side) for row in encode(tokenizer, batch))
        for side in (texts, english)
    )
    if not ours or not theirs:
        raise KieloError("parallel text has no token on one of its sides")
    return {
        "parity": ours / theirs,
        "parallel_texts": len(texts),
        "parallel_tokens": ours,
        "english_tokens": theirs,
    }


def batched(texts: Iterable[str]) -> Iterator[list[str]]:
    source = iter(texts)
    while batch := list(islice(source, BATCH_TEXTS)):
        yield batch
