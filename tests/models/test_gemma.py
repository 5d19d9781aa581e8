"""What a Gemma's section leaves out, in the layers that are built of it."""

import pytest
import torch

from kielo.models.families import build_model, complete
from kielo.recipe.sections import Model

KINDS = ("sliding_attention", "full_attention", "sliding_attention")


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
@pytest.mark.parametrize(("asked", "divisor"), [(None, 10), (77, 77)])
def test_scores_are_divided_by_the_root_of_the_width_of_a_head(model_type, asked, divisor) -> None:
    """Or of the number that the section has; embeddings are multiplied by the root of theirs. Windowed layers
    of a Gemma 3 have a RoPE of their own.
    """
    model = Model(
        model_type=model_type, vocab_size=97, hidden_size=24, num_attention_heads=6, head_dim=10,
        num_hidden_layers=3, query_pre_attn_scalar=asked, layer_types=KINDS, sliding_window=9,
        rope_theta=7e3, rope_local_base_freq=2e3 if model_type == "gemma3_text" else 1e4,
    )  # fmt: skip
    with torch.device("meta"):
        built = build_model(complete(model, 80))
    assert {layer.attention.inner.scale for layer in built.layers.values()} == {divisor**-0.5}
    assert built.embed_scale == 24**0.5 and [layer.kind for layer in built.layers.values()] == [*KINDS]
    assert built.rope.rope_theta == 7e3 and built.kinds["sliding_attention"].window == 9
    assert built.kinds["full_attention"].window is None
    if model_type == "gemma3_text":
        assert built.local_rope.rope_theta == 2e3 and built.kinds["sliding_attention"].rope == "local_rope"
    else:
        assert built.local_rope is None and built.kinds["sliding_attention"].rope == "rope"
