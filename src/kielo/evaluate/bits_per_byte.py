"""The bits that a model needs for each byte of held-out text.

Losses per token cannot be compared across tokenizers, bits per byte can. The convention: the held-out
documents form one stream, each closed by the end-of-text token, as in training; every token's bits are
counted exactly once, end-of-text included, except for tokens that the tokenizer puts before each text; they
are divided by the documents' UTF-8 bytes plus one byte for each border. The convention is the same for every
kind of contender (see `baselines.py`).

Windows overlap by default: they are one training sequence long and advance by half of it. Only tokens that no
earlier window counted are counted, so all but the first tokens have at least half a sequence of context.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np
import torch
import torch.nn.functional as F

from kielo.evaluate.contender import Contender
from kielo.recipe.errors import KieloError

MOST_TOKENS_PER_FORWARD = 8192
MOST_LOGITS_PER_FORWARD = 1 << 26  # 256 MiB in fp32; one window is always allowed


@dataclass(frozen=True)
class Window:
    """Inputs start … start + length - 1 of the stream; predictions from offset `first` on are counted."""

    start: int
    first: int


def counted_bytes(texts: Sequence[str]) -> int:
    """Returns the divisor of bits: UTF-8 bytes of the documents, and one for each document's border."""
    return sum(len(text.encode("utf-8")) + 1 for text in texts)


def windows(num_tokens: int, length: int, stride: int) -> Iterator[Window]:
    """Yields windows of one length (at most num_tokens) that count each prediction exactly once."""
    if not 1 <= stride <= length:
        raise KieloError(f"stride is {stride}; it must be between 1 and the sequence length, {length}")
    length = min(length, num_tokens)
    counted = 0
    while counted < num_tokens:
        end = length if counted == 0 else min(counted + stride, num_tokens)
        yield Window(end - length, counted - (end - length))
        counted = end


@torch.inference_mode()
def token_stream_bits(
    contender: Contender, tokens: np.ndarray, stride: int | None = None, counted: np.ndarray | None = None
) -> float:
    """Returns the total bits of the stream of tokens [n], which starts a document.

    stride: default half a sequence. counted: bool [n], the tokens whose bits count; None: all.
    """
    length = min(contender.sequence_length, len(tokens))
    stream = torch.from_numpy(np.concatenate([[contender.start_id], tokens])).to(torch.int64)
    weights = torch.ones(len(tokens)) if counted is None else torch.from_numpy(counted).float()
    stride = max(1, length // 2) if stride is None else min(stride, length)
    nats, rows = 0.0, 1  # until the number of logits is known
    for first, group in groupby(windows(len(tokens), length, stride), key=lambda window: window.first):
        while batch := list(islice(group, rows)):
            spans = torch.stack([stream[window.start : window.start + length + 1] for window in batch])
            spans = spans.to(contender.device)
            inputs, labels = spans[:, :-1], spans[:, 1:]
            logits = contender.logits(inputs, contender.documents(inputs))[:, first:]
            losses = F.cross_entropy(
                logits.flatten(0, 1).float(), labels[:, first:].flatten(), reduction="none"
            )
            counts = torch.stack([weights[one.start + first : one.start + length] for one in batch])
            nats += (losses.double() * counts.flatten().to(losses.device)).sum().item()
            most_tokens = min(MOST_TOKENS_PER_FORWARD, MOST_LOGITS_PER_FORWARD // logits.shape[-1])
            rows = max(1, most_tokens // length)
    return nats / np.log(2)


def bits_per_byte(contender: Contender, texts: Sequence[str], stride: int | None = None) -> float:
    """Returns the bits per byte of whole documents, in the order given."""
    tokens = contender.encode_documents(texts)
    return token_stream_bits(contender, tokens, stride, contender.counted(tokens)) / counted_bytes(texts)
