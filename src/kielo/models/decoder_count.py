"""Parameters and FLOPs of the parts that decoders share, by arithmetic on a `[model]` section; torch-free.

A family's `count.py` adds up what its layers have. Rows that pad the vocabulary do not count: they are
neither trained nor published.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Model

# Keys that few families read. For other families they are refused, because they would have no effect.
_RARE_KEYS = (
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope_local_base_freq",
    "rotary_pct",
    "use_parallel_residual",
    "position_bucket_size",
    "position_heads",
)


@dataclass(frozen=True)
class LayerParts:
    """The parts of a family's layer, from which its checks and the planner's bytes and seconds follow.

    mlp_matrices: 3 for a gated MLP, else 2. norms: those of whole hidden states. norms_inputs: do attention
    and MLP read what a norm gives? has_head_norms: are queries and keys normed too? has_mlp_norm: is the
    MLP's inside normed? has_groups: may heads share keys and values? has_alibi: positions are ALiBi's biases
    of the scores. relative_rows: scores have terms for so many relative positions. mlp_ratio:
    intermediate_size / hidden_size, where it is fixed.
    """

    mlp_matrices: Literal[2, 3]
    norms: int = 2
    norms_inputs: bool = True
    has_head_norms: bool = False
    is_rotary: bool = True
    has_groups: bool = True
    has_alibi: bool = False
    has_mlp_norm: bool = False
    relative_rows: int = 0
    mlp_ratio: int | None = None


def check(config: Model, parts: LayerParts, reads: Iterable[str] = (), others: Iterable[str] = ()) -> None:
    """Raises KieloError naming every key that is missing or does not fit the others.

    reads: those of `_RARE_KEYS` that the model reads. others: a family's own complaints.
    """
    complaints = [
        f"model.{key} is not set"
        for key in ("vocab_size", "num_key_value_heads", "head_dim", "max_position_embeddings")
        if getattr(config, key) is None
    ]
    if parts.is_rotary and config.head_dim and config.head_dim % 2:
        complaints.append(f"model.head_dim = {config.head_dim} is odd; rotary positions need pairs")
    if config.num_key_value_heads and config.num_attention_heads % config.num_key_value_heads:
        complaints.append(
            f"model.num_attention_heads = {config.num_attention_heads} is no multiple of "
            f"model.num_key_value_heads = {config.num_key_value_heads}"
        )
    if config.layer_types is not None and len(config.layer_types) != config.num_hidden_layers:
        complaints.append(
            f"model.layer_types has {len(config.layer_types)} entries for model.num_hidden_layers = "
            f"{config.num_hidden_layers}"
        )
    if "sliding_attention" in (config.layer_types or ()) and config.sliding_window is None:
        complaints.append("model.layer_types has sliding_attention, but model.sliding_window is not set")
    complaints += [
        f"model.{key} = {getattr(config, key)} is not for a {config.model_type} model"
        for key in _RARE_KEYS
        if key not in reads and getattr(config, key) != Model.model_fields[key].default
    ]
    complaints += others
    if complaints:
        raise KieloError("; ".join(complaints))


def only_all_heads(config: Model) -> Iterable[str]:
    """Yields the complaints of a family without grouped heads and windows, whose heads fill hidden_size."""
    yield from only_whole_heads(config)
    for key in ("sliding_window", "layer_types"):
        if getattr(config, key) is not None:
            yield f"model.{key} is set: a {config.model_type} model has no windows"


def only_whole_heads(config: Model) -> Iterable[str]:
    """Yields the complaints of a family without grouped heads, whose heads fill hidden_size."""
    heads, kind = config.num_attention_heads, config.model_type
    if config.num_key_value_heads not in (None, heads):
        yield (
            f"model.num_key_value_heads = {config.num_key_value_heads}: a {kind} model has as many as "
            f"model.num_attention_heads = {heads}"
        )
    if config.head_dim is not None and config.head_dim * heads != config.hidden_size:
        yield (
            f"model.head_dim = {config.head_dim}: a {kind} model's {heads} heads are model.hidden_size = "
            f"{config.hidden_size} wide together"
        )


def only(config: Model, **values: object) -> Iterable[str]:
    """Yields the complaints of a family that has only one value for each of these keys."""
    for key, value in values.items():
        if getattr(config, key) not in (None, value):
            yield f"model.{key} = {getattr(config, key)!r}: a {config.model_type} model has {value!r}"


def attention_parameters(config: Model, bias: bool, output_bias: bool) -> int:
    """Counts the parameters of the four matrices and their biases."""
    hidden = config.hidden_size
    q_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    return 2 * hidden * (q_width + kv_width) + (q_width + 2 * kv_width) * bias + hidden * output_bias


def gated_mlp_parameters(config: Model, bias: bool) -> int:
    return (
        3 * config.hidden_size * config.intermediate_size
        + (2 * config.intermediate_size + config.hidden_size) * bias
    )


def plain_mlp_parameters(config: Model, bias: bool) -> int:
    return (
        2 * config.hidden_size * config.intermediate_size
        + (config.intermediate_size + config.hidden_size) * bias
    )


def embedding_parameters(config: Model) -> int:
    """Counts one row of hidden_size for each token that exists."""
    return config.vocab_size * config.hidden_size


def layer_types(config: Model) -> tuple[str, ...]:
    """Returns each layer's "full_attention" or "sliding_attention"; a window without types is all layers'."""
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    return config.layer_types or (kind,) * config.num_hidden_layers


def flops_per_token(config: Model, multiplied_parameters: int, sequence_length: int) -> int:
    """Computes the model FLOPs of one trained token, forward and backward, without recomputation.

    6 for each parameter that a token is multiplied with (Kaplan et al. 2020, arXiv:2001.08361) and, for
    causal attention, 12 × width × the keys that a query sees on average: half a sequence, or of a window w in
    a sequence s w - w²/2s (Chowdhery et al. 2022, arXiv:2204.02311, appendix B, counts all s).
    """
    width = config.num_attention_heads * config.head_dim
    attention = 0
    for kind in layer_types(config):
        window = sequence_length
        if kind == "sliding_attention":
            window = min(config.sliding_window, sequence_length)
        attention += 6 * width * window * (2 * sequence_length - window) // sequence_length
    return 6 * multiplied_parameters + attention
