"""Llama in Hugging Face's words: parameter names one to one, and the `config.json` of an export; torch-free."""

from typing import Any

from kielo.models.families import normalise_rope
from kielo.recipe.sections import Model

_LAYER_MODULES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def to_hugging_face(config: Model) -> dict[str, str]:
    """Our parameter name → the name in a LlamaForCausalLM file, in the model's order; no head where it is tied."""
    names = {"embed.weight": "model.embed_tokens.weight"}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in _LAYER_MODULES.items():
            biased = config.attention_bias if "attention." in ours else config.mlp_bias and "mlp." in ours
            for kind in ("weight", "bias") if biased else ("weight",):
                names[f"layers.{layer}.{ours}.{kind}"] = f"model.layers.{layer}.{theirs}.{kind}"
    names["norm.weight"] = "model.norm.weight"
    if not config.tie_word_embeddings:
        names["head.weight"] = "lm_head.weight"
    return names


def hf_config(
    config: Model,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """The `config.json` of an export. `dtype` is what the weights are stored in.

    RoPE and the dtype are in transformers 4's spelling, which transformers 4 and 5 both read.
    """
    rope_theta, rope_scaling = normalise_rope(
        config.rope_theta, config.rope_scaling, config.max_position_embeddings
    )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "mlp_bias": config.mlp_bias,
        "initializer_range": config.initializer_range,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": dtype,
        "use_cache": True,
    }
