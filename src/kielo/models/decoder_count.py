"""Parameters and FLOPs of the parts that decoders share, by arithmetic on a `[model]` section; torch-free.

A family's `tables.py` adds up what its layers have. Rows that pad the vocabulary do not count: they are
neither trained nor published.
"""

from dataclasses import dataclass
from typing import Literal

from kielo.recipe.sections import CompleteModel


@dataclass(frozen=True)
class LayerParts:
    """The parts of a family's layer, from which its checks and the planner's bytes and seconds follow.

    mlp_matrices: 3 for a gated MLP, else 2. norms: those of whole hidden states. norms_inputs: do attention
    and MLP read what a norm gives? has_head_norms: are queries and keys normed too? has_mlp_norm: is the
    MLP's inside normed? is_parallel: do attention and MLP read the same hidden states? has_groups: may heads
    share keys and values? has_alibi: positions are ALiBi's biases of the scores. relative_rows: scores have
    terms for so many relative positions. mlp_ratio: intermediate_size / hidden_size, where it is fixed.
    """

    mlp_matrices: Literal[2, 3]
    norms: int = 2
    norms_inputs: bool = True
    has_head_norms: bool = False
    is_rotary: bool = True
    has_groups: bool = True
    has_alibi: bool = False
    has_mlp_norm: bool = False
    is_parallel: bool = False
    relative_rows: int = 0
    mlp_ratio: int | None = None


def attention_parameters(config: CompleteModel, bias: bool, output_bias: bool) -> int:
    """Counts the parameters of the four matrices and their biases."""
    hidden = config.hidden_size
    q_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    return 2 * hidden * (q_width + kv_width) + (q_width + 2 * kv_width) * bias + hidden * output_bias


def gated_mlp_parameters(config: CompleteModel, bias: bool) -> int:
    return (
        3 * config.hidden_size * config.intermediate_size
        + (2 * config.intermediate_size + config.hidden_size) * bias
    )


def plain_mlp_parameters(config: CompleteModel, bias: bool) -> int:
    return (
        2 * config.hidden_size * config.intermediate_size
        + (config.intermediate_size + config.hidden_size) * bias
    )


def embedding_parameters(config: CompleteModel) -> int:
    """Counts one row of hidden_size for each token that exists."""
    return config.vocab_size * config.hidden_size


def layer_types(config: CompleteModel) -> tuple[str, ...]:
    """Return each layer's "full_attention" or "sliding_attention"; a window without types is all layers'."""
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    return config.layer_types or (kind,) * config.num_hidden_layers


def flops_per_token(config: CompleteModel, multiplied_parameters: int, sequence_length: int) -> int:
    """Compute the model FLOPs of one trained token, forward and backward, without recomputation.

    6 for each parameter that a token is multiplied with (Kaplan et al. 2020, arXiv:2001.08361) and, for
    causal attention, 12 × width × the keys that a query sees on average: half a sequence, or of a window w in
    a sequence s w - w²/2s (Chowdhery et al. 2022, arXiv:2204.02311, appendix B, counts all s).
    """
    width = config.num_attention_heads * config.head_dim
    attention = 0
    for kind in layer_types(config):
        window = sequence_length
        if kind == "sliding_attention" and config.sliding_window is not None:
            window = min(config.sliding_window, sequence_length)
        attention += 6 * width * window * (2 * sequence_length - window) // sequence_length
    return 6 * multiplied_parameters + attention
