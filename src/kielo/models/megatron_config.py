"""The arguments of a Megatron training → the config.json that its model would have; torch-free.

Which family a model is follows from its norm, positions and MLP. Settings that change what a model computes,
and that no family has, are refused by name. Settings of the training alone, such as a z-loss, are not read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kielo.artifact import megatron_folder
from kielo.artifact.inert_data import Made
from kielo.recipe.errors import KieloError

# bigscience's enum, which is stored by its number.
_POSITION_NUMBERS = {1: "rope", 2: "learned_absolute", 3: "alibi"}
_POSITIONS = {
    "learned_absolute": "learned_absolute", "absolute": "learned_absolute", "rope": "rope",
    "rotary": "rope", "alibi": "alibi",
}  # fmt: skip
# Settings of models that no family has → their values in models that Kielo can read.
_OFF = (None, False, 0)
_ONLY: dict[str, tuple[object, ...]] = {
    "num_experts": (None, 0, 1),
    "num_moe_experts": _OFF,
    "multi_latent_attention": _OFF,
    "apply_layernorm_1p": _OFF,
    "layernorm_zero_centered_gamma": _OFF,
    "apply_residual_connection_post_layernorm": _OFF,
    "rotary_interleaved": _OFF,
    "squared_relu": _OFF,
    "quick_geglu": _OFF,
    "geglu": _OFF,
    "reglu": _OFF,
    "liglu": _OFF,
    "glu_activation": _OFF,
    "glu_linear_offset": _OFF,
    "activation_func_clamp_value": _OFF,
    "parallel_attn": _OFF,
    "attention_output_gate": _OFF,
    "qk_l2_norm": _OFF,
    "no_rope_freq": _OFF,
    "softmax_type": (None, "vanilla"),
    "softmax_scale": (None,),
    "window_size": (None,),
    "is_hybrid_model": _OFF,
    "hybrid_override_pattern": _OFF,
    "mtp_num_layers": _OFF,
    "experimental_attention_variant": _OFF,
    "linear_attention_freq": _OFF,
    "heterogeneous_layers_config_path": _OFF,
    "retro_add_retriever": _OFF,
    "add_retriever": _OFF,
    "mrope_section": _OFF,
    "rope_type": (None, "rope"),
    "deepnorm": _OFF,
    "use_mup": _OFF,
}


def read_config(folder: Path) -> tuple[str, dict[str, Any], str]:
    """Return the model type, the keys of config.json, and the file of the arguments, for messages."""
    found = megatron_folder.read_arguments(folder)
    arguments = _Settings(found)
    arguments.refuse_unknown()
    model_type = _model_type(arguments)
    return model_type, _CONFIGS[model_type](arguments) | _common(arguments), str(found.path)


def left_open(folder: Path) -> str:
    """Return, in words, the settings that a checkpoint's arguments lack, and its parts that are not read."""
    found = megatron_folder.read_arguments(folder)
    said = [*_open(_Settings(found)), _optimiser(folder)]
    return f"{found.path.name} of {folder} is read as a {read_config(folder)[0]}; " + "; ".join(said)


def _open(arguments: "_Settings") -> Iterator[str]:
    rows, tokens = arguments.number("padded_vocab_size"), arguments.vocabulary
    if rows == tokens:
        yield f"all {rows:,} rows of the vocabulary stay, as the arguments do not say how many are padding"
    else:
        yield f"{rows - tokens:,} of {rows:,} rows of the vocabulary are padding and left out"
    kind, model = arguments.get("tokenizer_type"), arguments.get("tokenizer_model")
    named = model or arguments.get("tokenizer_name_or_path") or arguments.get("vocab_file")
    yield f"its tokenizer is not in it ({kind or 'no tokenizer_type'}{f', {named}' if named else ''})"
    settings = ("rotary_base", "normalization", "bias_gelu_fusion")
    missing = [key for key in settings if not arguments.has(key)]
    if arguments.has("rope_theta") and "rotary_base" in missing:
        missing.remove("rotary_base")
    if missing:
        yield f"its arguments lack {', '.join(missing)}, so Megatron's defaults hold"


def _optimiser(folder: Path) -> str:
    if (obstacle := megatron_folder.optimiser_obstacle(folder)) is not None:
        return f"its optimiser is not read, so moments, learning rate and data begin again: {obstacle}"
    only = "only with train.optimiser_from_weights = true"
    return f"its moments are taken {only}, and learning rate and data begin again"


class _Settings:
    """Arguments by name, with complaints that name the file."""

    def __init__(self, found: megatron_folder.Arguments):
        self.path, self._values = found.path, found.values

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, *names: str, default: Any = None) -> Any:
        return next((self._values[name] for name in names if self.has(name)), default)

    def number(self, *names: str, default: int | None = None) -> int:
        value = self.get(*names, default=default)
        if type(value) is not int or value < 1:
            raise KieloError(f"{self.path}: args.{names[0]} = {value!r} is no size of a model")
        return value

    def refuse_unknown(self) -> None:
        """Refuse settings that change what the model computes, and that no family has."""
        for name, known in _ONLY.items():
            value = self._values.get(name)
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
            if not any(value is one or (type(value) is type(one) and value == one) for one in known):
                said = value.name if isinstance(value, Made) else repr(value)
                raise KieloError(f"{self.path}: args.{name} = {said}, which no model family of Kielo has")

    @property
    def norm(self) -> str:
        return str(self.get("normalization", default="LayerNorm")).lower()

    @property
    def positions(self) -> str:
        if self.get("use_rotary_position_embeddings", default=False):
            return "rope"
        value = self.get("position_embedding_type", default="learned_absolute")
        if isinstance(value, Made):
            value = _POSITION_NUMBERS.get(value.arguments[0] if value.arguments else 0, value.name)
        if value not in _POSITIONS:
            raise KieloError(
                f"{self.path}: args.position_embedding_type = {value!r}, which no model family of Kielo has"
            )
        return _POSITIONS[value]

    @property
    def is_gated(self) -> bool:
        return bool(self.get("swiglu", default=False))

    @property
    def has_biases(self) -> bool:
        return bool(self._values.get("add_bias_linear", True))

    @property
    def gelu(self) -> str:
        """The name of config.json: the fused kernel of bias and GELU computes by tanh."""
        if self.get("onnx_safe", default=False):
            return "gelu"
        is_fused = self._values.get("bias_gelu_fusion", True) is not False
        return "gelu_new" if is_fused or self.get("openai_gelu", default=False) else "gelu"

    @property
    def vocabulary(self) -> int:
        """The tokens without padding, if the arguments say a number that pads to the rows; else the rows."""
        rows = self.number("padded_vocab_size")
        if self.has(megatron_folder.UNPADDED_VOCABULARY):
            return min(rows, self.number(megatron_folder.UNPADDED_VOCABULARY))
        said = self.get("vocab_size")
        multiple = self.get("make_vocab_size_divisible_by", default=128)
        multiple *= self.get("tensor_model_parallel_size", "model_parallel_size", default=1)
        # A NullTokenizer counts end-of-text beside them.
        extra = 1 if self.get("tokenizer_type") == "NullTokenizer" else 0
        if (
            type(said) is int
            and 0 < said + extra <= rows
            and -(-(said + extra) // multiple) * multiple == rows
        ):
            return said + extra
        return rows


def _model_type(arguments: _Settings) -> str:
    norm, positions = arguments.norm, arguments.positions
    is_gated, has_biases = arguments.is_gated, arguments.has_biases
    if (norm, positions, is_gated) == ("rmsnorm", "rope", True):
        if arguments.get("qk_layernorm", default=False):
            return "qwen3"
        return "qwen2" if arguments.get("add_qkv_bias", default=False) and not has_biases else "llama"
    if norm == "layernorm" and not is_gated and has_biases:
        return {"learned_absolute": "gpt2", "rope": "gpt_neox", "alibi": "bloom"}[positions]
    raise KieloError(
        f"{arguments.path}: no model family of Kielo has args.normalization = {norm}, "
        f"position_embedding_type = {positions}, swiglu = {is_gated} and add_bias_linear = {has_biases}. "
        "Fix: RMSNorm, rope and swiglu (Llama, Qwen), or LayerNorm, biases and no swiglu (GPT, BLOOM)"
    )


def _common(arguments: _Settings) -> dict[str, Any]:
    untied = arguments.get("untie_embeddings_and_output_weights", default=False)
    return {
        "vocab_size": arguments.vocabulary,
        "tie_word_embeddings": not untied,
        "initializer_range": arguments.get("init_method_std", default=0.02),
    }


def _sizes(arguments: _Settings) -> tuple[int, int, int, int]:
    hidden, heads = arguments.number("hidden_size"), arguments.number("num_attention_heads")
    inside = arguments.number("ffn_hidden_size", default=4 * hidden)
    return hidden, inside, arguments.number("num_layers"), heads


def _key_heads(arguments: _Settings) -> int:
    heads = arguments.number("num_attention_heads")
    has_groups = arguments.get("group_query_attention", default=False)
    older = arguments.get("num_key_value_heads")  # Megatron-DeepSpeed's
    return arguments.number("num_query_groups") if has_groups else older or heads


def _positions(arguments: _Settings) -> int:
    return arguments.number("max_position_embeddings", "seq_length")


def _epsilon(arguments: _Settings) -> float:
    return arguments.get("norm_epsilon", "layernorm_epsilon", default=1e-5)


def _rope(arguments: _Settings) -> dict[str, Any]:
    base = arguments.get("rotary_base", "rope_theta", default=10_000)  # the second is Megatron-DeepSpeed's
    if (other := arguments.get("rope_theta", default=base)) != base:
        raise KieloError(f"{arguments.path}: args.rotary_base = {base}, but args.rope_theta = {other}")
    found: dict[str, Any] = {"rope_theta": float(base)}
    if (factor := arguments.get("rotary_seq_len_interpolation_factor")) not in (None, 1):
        found["rope_scaling"] = {"rope_type": "linear", "factor": float(factor)}
    if arguments.get("use_rope_scaling", default=False):
        found["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": float(arguments.get("rope_scaling_factor", default=8.0)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return found


def _llama(arguments: _Settings) -> dict[str, Any]:
    hidden, inside, layers, heads = _sizes(arguments)
    if (share := arguments.get("rotary_percent", default=1.0)) != 1.0:
        raise KieloError(f"{arguments.path}: args.rotary_percent = {share}; in models with RMSNorm it is 1.0")
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": inside,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _key_heads(arguments),
        "head_dim": arguments.number("kv_channels", default=hidden // heads),
        "max_position_embeddings": _positions(arguments),
        "rms_norm_eps": _epsilon(arguments),
    }
    model_type = _model_type(arguments)
    if model_type == "llama":
        config["mlp_bias"] = arguments.has_biases
    if model_type != "qwen2":
        config["attention_bias"] = arguments.has_biases
    return config | _rope(arguments)


def _gpt2(arguments: _Settings) -> dict[str, Any]:
    hidden, inside, layers, heads = _sizes(arguments)
    return {
        "n_embd": hidden,
        "n_inner": inside,
        "n_layer": layers,
        "n_head": heads,
        "head_dim": arguments.number("kv_channels", default=hidden // heads),
        "n_positions": _positions(arguments),
        "layer_norm_epsilon": _epsilon(arguments),
        "activation_function": arguments.gelu,
    } | _without_groups(arguments)


def _gpt_neox(arguments: _Settings) -> dict[str, Any]:
    hidden, inside, layers, heads = _sizes(arguments)
    rope = _rope(arguments)
    return {
        "hidden_size": hidden,
        "intermediate_size": inside,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": arguments.number("kv_channels", default=hidden // heads),
        "max_position_embeddings": _positions(arguments),
        "layer_norm_eps": _epsilon(arguments),
        "hidden_act": arguments.gelu,
        "rotary_emb_base": rope.pop("rope_theta"),
        "rotary_pct": float(arguments.get("rotary_percent", default=1.0)),
        "use_parallel_residual": False,
    } | (rope | _without_groups(arguments))


def _bloom(arguments: _Settings) -> dict[str, Any]:
    hidden, _, layers, heads = _sizes(arguments)
    if not arguments.get("embed_layernorm", default=False):
        raise KieloError(
            f"{arguments.path}: args.embed_layernorm is off, and every BLOOM has a norm after its embedding"
        )
    if arguments.number("ffn_hidden_size", default=4 * hidden) != 4 * hidden:
        raise KieloError(f"{arguments.path}: args.ffn_hidden_size is not 4 × hidden_size, as in every BLOOM")
    return {
        "hidden_size": hidden,
        "n_layer": layers,
        "n_head": heads,
        "head_dim": arguments.number("kv_channels", default=hidden // heads),
        "seq_length": _positions(arguments),
        "layer_norm_epsilon": _epsilon(arguments),
        "hidden_act": arguments.gelu,
    } | _without_groups(arguments)


def _without_groups(arguments: _Settings) -> dict[str, Any]:
    if (groups := _key_heads(arguments)) != arguments.number("num_attention_heads"):
        raise KieloError(
            f"{arguments.path}: args.num_query_groups = {groups}; models with LayerNorm have none here"
        )
    return {}


_CONFIGS = {
    "llama": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bloom": _bloom,
}
