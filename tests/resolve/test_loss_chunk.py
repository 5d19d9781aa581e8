"""Tokens whose logits exist at one time: the recipe's, or by the device's memory."""

import pytest

from kielo.models.families import complete
from kielo.recipe.cards import accelerator
from kielo.recipe.sections import Layout, Model
from kielo.resolve.activation_bytes import loss_chunk_tokens


@pytest.mark.parametrize(
    ("asked", "card", "vocabulary", "tensor", "tokens"),
    [
        (None, "h200", 128_256, 1, 4096),  # 141 GB / 128 / (2 bytes × 128,256) = 4,294
        (None, "h200", 128_256, 8, 32_768),
        (None, "h100_80", 32_000, 1, 8192),
        (None, "v100_16", 128_256, 1, 2048),  # fewer are not worth it
        (None, "cpu", 100, 1, 2048),
        (None, None, 100, 1, 2048),
        (300, "h200", 128_256, 1, 300),
    ],
)
def test_a_chunks_logits_take_their_share_of_memory(asked, card, vocabulary, tensor, tokens):
    model = complete(Model(vocab_size=vocabulary), 64)
    found = loss_chunk_tokens(asked, model, Layout(tensor=tensor), card and accelerator(card))
    assert found == tokens


@pytest.mark.parametrize(("memory_bytes", "tokens"), [(2**37, 8192), (2**37 - 2**20, 4096), (2**38, 16_384)])
def test_a_share_is_a_128th(memory_bytes, tokens):
    """2^37 / 128 bytes are 8,192 tokens × 65,536 logits × 2 bytes, and no more."""
    card = accelerator("h200").model_copy(update={"memory_bytes": memory_bytes})
    assert loss_chunk_tokens(None, complete(Model(vocab_size=65_536), 64), Layout(), card) == tokens
