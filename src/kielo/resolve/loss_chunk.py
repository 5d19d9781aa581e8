"""Chooses the tokens whose logits exist at one time, by a device's memory; arithmetic, no torch."""

from kielo.recipe.cards import Accelerator
from kielo.recipe.sections import Layout, Model

LEAST_CHUNK_TOKENS = 2048  # products of so many rows keep a device busy
# Share of a device's memory that a chunk's logits may take in bf16. Uncompiled, with their fp32 softmax and
# the chunk before, they take four times as much.
_LOGITS_SHARE = 1 / 128
_LOGIT_BYTES = 2


def loss_chunk_tokens(asked: int | None, model: Model, layout: Layout, card: Accelerator | None) -> int:
    """Returns the recipe's choice, else the largest power of two whose logits fit their share of memory.

    Each chunk reads and writes the head's fp32 gradient once, so few and large ones are faster on a GPU. On a
    CPU, and on a device of unknown memory, it is the least that is worth it.
    """
    if asked is not None:
        return asked
    if card is None or card.device == "cpu" or card.memory_bytes is None:
        return LEAST_CHUNK_TOKENS
    fitting = _LOGITS_SHARE * card.memory_bytes * layout.tensor / (_LOGIT_BYTES * model.vocab_rows)
    return max(LEAST_CHUNK_TOKENS, 1 << int(fitting).bit_length() >> 1)
