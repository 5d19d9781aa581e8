"""One tiny Hugging Face config for each variant of each family,
chosen so that every switch shows in the numbers.

24 tokens are longer than the windows; 97 tokens pad to 128 rows.
"""

from typing import Any

VOCABULARY, LENGTH, WINDOW = 97, 24, 7

_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": None,
    "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
_YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2}
_LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_GPT2 = {
    "model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 32,
    "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
_MODERNBERT = {
    "model_type": "modernbert", "num_key_value_heads": None, "local_attention": 6,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1.6e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}  # fmt: skip

TINY: dict[str, dict[str, Any]] = {
    "llama": _SMALL | {"model_type": "llama"},
    "llama, llama3 rope, tied": _SMALL | {
        "model_type": "llama", "rope_scaling": _LLAMA3_ROPE, "rope_theta": 5e5, "tie_word_embeddings": True,
    },
    "llama, linear rope, biases, wide heads": _SMALL | {
        "model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "attention_bias": True,
        "mlp_bias": True, "head_dim": 16, "num_key_value_heads": 4,
    },
    "mistral": _SMALL | {"model_type": "mistral", "sliding_window": WINDOW},
    "qwen2": _SMALL | {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": _SMALL | {"model_type": "qwen3", "head_dim": 16},
    "olmo2": _SMALL | {"model_type": "olmo2"},
    "olmo2, yarn rope, biases, wide heads, tied": _SMALL | {
        "model_type": "olmo2", "rope_scaling": _YARN_ROPE, "rope_theta": 1e2, "attention_bias": True,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "olmo3": _SMALL | {
        "model_type": "olmo3", "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 5e5, "rope_scaling": _YARN_ROPE | {"attention_factor": 1.3},
    },
    "olmo3, another base, no window": _SMALL | {
        "model_type": "olmo3", "layer_types": ["full_attention", "full_attention"], "num_key_value_heads": 4,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e3},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    },
    "gemma2": _SMALL | {
        "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW,
        "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0,
    },
    "gemma2, no caps, linear rope, biases, untied": _SMALL | {
        "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW,
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "tie_word_embeddings": False,
    },
    "gemma3_text": _SMALL | {
        "model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"], "rope_theta": 1e6,
        "rope_local_base_freq": 1e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3_text, capped logits, no window, untied": _SMALL | {
        "model_type": "gemma3_text", "head_dim": 8, "layer_types": ["full_attention", "full_attention"],
        "final_logit_softcapping": 2.0, "tie_word_embeddings": False,
    },
    "gpt2": _GPT2,
    "gpt2, untied, exact gelu, narrow": _GPT2 | {
        "n_inner": 48, "tie_word_embeddings": False, "activation_function": "gelu",
        "layer_norm_epsilon": 1e-2,
    },
    "opt": _SMALL | {"model_type": "opt", "ffn_dim": 48},
    "opt, no biases, untied, gelu": _SMALL | {
        "model_type": "opt", "ffn_dim": 48, "enable_bias": False, "tie_word_embeddings": False,
        "activation_function": "gelu",
    },
    "gpt_neox": _SMALL | {"model_type": "gpt_neox", "rotary_pct": 0.5},
    "gpt_neox, in sequence, tied, no biases, linear rope, tanh gelu": _SMALL | {
        "model_type": "gpt_neox", "use_parallel_residual": False, "tie_word_embeddings": True,
        "attention_bias": False,
        "rotary_pct": 0.25, "rotary_emb_base": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "hidden_act": "gelu_fast", "layer_norm_eps": 1e-2,
    },
    "bloom": _SMALL | {"model_type": "bloom", "seq_length": 32},
    "bloom, six heads, untied": _SMALL | {
        "model_type": "bloom", "hidden_size": 48, "n_head": 6, "num_attention_heads": 6, "seq_length": 64,
        "tie_word_embeddings": False, "layer_norm_epsilon": 1e-2,
    },
    "modernbert": _SMALL | _MODERNBERT,
    "modernbert, biases, another order of layers, tanh gelu": _SMALL | _MODERNBERT | {
        "num_hidden_layers": 3, "attention_bias": True, "mlp_bias": True, "norm_eps": 1e-2,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "hidden_activation": "gelu_pytorch_tanh", "local_attention": 7,
    },
}  # fmt: skip
