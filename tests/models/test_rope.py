"""RoPE's scaled forms against transformers' own."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kielo.models.blocks.rope import RotaryEmbedding

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
