"""RoPE's scaled forms against transformers' own."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kielo.models.blocks.rope import RotaryEmbedding, inverse_frequencies
from kielo.recipe.errors import KieloError

OLMO_3 = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "scaling",
    [
        OLMO_3,
        OLMO_3 | {"attention_factor": 1.5, "beta_fast": 64, "beta_slow": 0.01},
        OLMO_3 | {"mscale": 1.0, "mscale_all_dim": 0.5, "factor": 40.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "linear", "factor": 8.0},
    ],
)
def test_tables_are_transformers(scaling: dict) -> None:
    """All of 65,536 positions are equal to the bit,
    for numbers that are given and for those that are left out.
    """
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=65_536,
        rope_theta=5e5,
        rope_scaling=dict(scaling),
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    angles = torch.outer(torch.arange(65_536, dtype=torch.float32), frequencies)
    rope = RotaryEmbedding(5e5, 128, scaling, 65_536)
    assert torch.equal(rope.cos, angles.cos() * factor) and torch.equal(rope.sin, angles.sin() * factor)


@pytest.mark.parametrize(
    ("base", "scaling"),
    [
        # the fastest pairs are before the first one, the slowest beyond the last
        (5e5, {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 64}),
        (1.7, {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 64}),
        (2.0, {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 4096,
               "beta_slow": 0.01}),
        # one pair between kept and scaled ones
        (5e5, {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 64, "beta_slow": 32}),
        (5e3, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 256}),
    ],
)  # fmt: skip
def test_frequencies_at_the_ends_are_transformers(base: float, scaling: dict) -> None:
    """Of heads of 48 numbers, to the last bits."""
    config = LlamaConfig(
        hidden_size=96, num_attention_heads=2, max_position_embeddings=512, rope_theta=base,
        rope_scaling=dict(scaling),
    )  # fmt: skip
    expected, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    torch.testing.assert_close(inverse_frequencies(base, 48, scaling, 512), expected, rtol=1e-6, atol=0)


def test_a_length_is_the_first_positions_and_no_more_than_there_are() -> None:
    """Angle = position × base^(-2i / size); positions in a tensor are looked up."""
    rope = RotaryEmbedding(100.0, 4, None, 9)
    angles = torch.arange(9.0)[:, None] * torch.tensor([1.0, 0.1])
    cos, sin = rope(9)
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())
    assert torch.equal(rope(3)[0], cos[:3]) and torch.equal(rope(3)[1], sin[:3])
    places = torch.tensor([8, 2])
    assert torch.equal(rope(places)[0], cos[places]) and torch.equal(rope(places)[1], sin[places])
    with pytest.raises(KieloError) as caught:
        rope(10)
    assert str(caught.value) == (
        "a sequence of 10 tokens is longer than model.max_position_embeddings = 9. Fix: a shorter sequence, "
        "or a larger model.max_position_embeddings"
    )
