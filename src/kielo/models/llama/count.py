"""Parameters and FLOPs of a Llama, by arithmetic on its `[model]` section; torch-free.

The one home of the model FLOPs that the meter and the planner report.
"""

from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Model


def check(config: Model) -> None:
    """KieloError naming every key that is missing or does not fit the others."""
    complaints = [
        f"model.{key} is not set"
        for key in ("vocab_size", "num_key_value_heads", "head_dim", "max_position_embeddings")
        if getattr(config, key) is None
    ]
    if config.head_dim and config.head_dim % 2:
        complaints.append(f"model.head_dim = {config.head_dim} is odd; rotary positions need pairs")
    if config.num_key_value_heads and config.num_attention_heads % config.num_key_value_heads:
        complaints.append(
            f"model.num_attention_heads = {config.num_attention_heads} is no multiple of "
            f"model.num_key_value_heads = {config.num_key_value_heads}"
        )
    if complaints:
        raise KieloError("; ".join(complaints))


def layer_parameters(config: Model) -> int:
    """Of one layer: attention, MLP, their biases where asked for, and two norms."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    attention = 2 * hidden * q_width + 2 * hidden * kv_width
    mlp = 3 * hidden * intermediate
    attention_biases = (q_width + 2 * kv_width + hidden) * config.attention_bias
    mlp_biases = (2 * intermediate + hidden) * config.mlp_bias
    return attention + mlp + attention_biases + mlp_biases + 2 * hidden


def parameters(config: Model) -> int:
    """All parameters; a tied head counts once."""
    input_embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return input_embedding + parameters_without_embedding(config)


def parameters_without_embedding(config: Model) -> int:
    """Parameters that each token is multiplied with: all but the look-up table; the head counts, tied or not."""
    head = config.vocab_size * config.hidden_size
    return config.num_hidden_layers * layer_parameters(config) + config.hidden_size + head


def flops_per_token(config: Model, sequence_length: int) -> int:
    """Model FLOPs of one trained token, forward and backward, no recomputation.

    6 a parameter (Kaplan et al. 2020, arXiv:2001.08361) and 6 × layers × width × sequence for causal attention,
    which is half of the 12 of full attention (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
    """
    width = config.num_attention_heads * config.head_dim
    attention = 6 * config.num_hidden_layers * width * sequence_length
    return 6 * parameters_without_embedding(config) + attention
