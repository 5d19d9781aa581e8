"""Megatron's arguments of the model and its vocabulary to [model] and [tokenizer]."""

import re

from kielo.recipe.from_script.script_arguments import TRANSLATED, Translation
from kielo.recipe.from_script.tokenizer_places import put_tokenizer

_LLAMA_3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def put_model(to: Translation, model_type: str | None) -> None:
    """Set the keys of [model], and refuse shapes that no family has."""
    width, heads = to.value("--hidden-size"), to.value("--num-attention-heads")
    if not to.has("--kv-channels"):
        to.must_divide(width, heads, "--hidden-size", "--num-attention-heads")
    gated = to.is_on("--swiglu") or to.value("--glu-activation") == "swiglu"
    family = model_type or _family(to, gated)
    said = ("--position-embedding-type", "--use-rotary-position-embeddings", "--normalization", "--swiglu",
            "--glu-activation", "--qk-layernorm", "--window-size")  # fmt: skip
    to.put("model.model_type", family, *said)
    if to.has("--ffn-hidden-size"):
        inner = to.value("--ffn-hidden-size")
    else:
        inner = width * 4 * 2 // 3 // 64 * 64 if gated else 4 * width
    to.put("model.intermediate_size", inner, "--ffn-hidden-size")
    groups = to.value("--num-key-value-heads")  # Megatron-DeepSpeed's
    if to.has("--group-query-attention"):
        groups = to.value("--num-query-groups", 1)
    if groups is not None:
        of_groups = ("--num-query-groups", "--group-query-attention", "--num-key-value-heads")
        to.must_divide(heads, groups, "--num-attention-heads", *of_groups)
        to.put("model.num_key_value_heads", groups, *of_groups)
    is_bloom_like = family in ("bloom", "gpt2", "gpt_neox", "opt")
    key = "layer_norm_epsilon" if is_bloom_like else "rms_norm_eps"
    to.put(f"model.{key}", to.value("--norm-epsilon", 1e-5), "--norm-epsilon")
    to.put("model.initializer_range", to.value("--init-method-std", 0.02), "--init-method-std")
    tied = not to.has("--untie-embeddings-and-output-weights")
    to.put("model.tie_word_embeddings", tied, "--untie-embeddings-and-output-weights")
    _biases(to, family)
    _positions(to, family)
    if family == "bloom" and not to.has("--embed-layernorm"):
        to.add_default(
            "--embed-layernorm", "changes the model: a bloom always has a norm after the embedding"
        )
    elif family == "bloom":
        to.say("--embed-layernorm", TRANSLATED, "a bloom always has it")
    else:
        to.drop("--embed-layernorm", f"changes the model: a {family} has no norm after the embedding")
    for name in ("--num-layers", "--hidden-size", "--num-attention-heads"):
        if to.value(name) <= 0:
            to.refuse("is not above 0. Fix: a number above 0", name)
    length, positions = to.value("--seq-length"), to.value("--max-position-embeddings")
    if positions is not None and positions < length:
        to.refuse(
            f"{length} tokens have only {positions} positions", "--seq-length", "--max-position-embeddings"
        )


def _family(to: Translation, gated: bool) -> str:
    """Return the family that positions, norms and activation make."""
    positions = to.value("--position-embedding-type", "learned_absolute")
    if to.has("--use-rotary-position-embeddings") or positions == "rotary":
        positions = "rope"
    norm = to.value("--normalization", "LayerNorm")
    kind = (positions, norm.lower(), gated)
    if kind == ("rope", "rmsnorm", True):
        if to.is_on("--qk-layernorm"):
            return "qwen3"
        if to.is_on("--add-qkv-bias") and to.is_on("--disable-bias-linear"):
            return "qwen2"
        return "mistral" if to.has("--window-size") else "llama"
    families = {
        ("rope", "layernorm", False): "gpt_neox",
        ("alibi", "layernorm", False): "bloom",
        ("learned_absolute", "layernorm", False): "gpt2",
    }
    if kind in families:
        return families[kind]
    names = ("--position-embedding-type", "--use-rotary-position-embeddings", "--normalization", "--swiglu",
             "--glu-activation")  # fmt: skip
    to.refuse(
        f"no family of Kielo has {positions} positions, {norm} and {'a gated' if gated else 'no gated'} MLP. "
        "There are rope, RMSNorm and a gated MLP (llama); rope, alibi or learned_absolute positions with "
        "LayerNorm and no gate (gpt_neox, bloom, gpt2). Fix: --model-type llama for the nearest",
        *names,
    )
    return "llama"


def _biases(to: Translation, family: str) -> None:
    has_bias = not to.has("--disable-bias-linear")
    is_usual = family in ("gpt2", "gpt_neox", "bloom", "opt")
    attention = has_bias or to.is_on("--add-qkv-bias")
    if family in ("llama", "mistral", "qwen2", "qwen3"):
        if family != "qwen2":
            to.put("model.attention_bias", attention, "--disable-bias-linear", "--add-qkv-bias")
        to.put("model.mlp_bias", has_bias, "--disable-bias-linear")
    elif is_usual and not has_bias:
        to.drop("--disable-bias-linear", f"changes the model: a {family} has biases")
    to.drop(
        "--add-qkv-bias", f"a {family} has it" if family == "qwen2" or is_usual else "as model.attention_bias"
    )


def _positions(to: Translation, family: str) -> None:
    is_rotary = family not in ("bloom", "gpt2", "opt")
    for name in ("--rotary-base", "--rotary-percent", "--use-rope-scaling", "--rope-scaling-factor",
                 "--rotary-seq-len-interpolation-factor"):  # fmt: skip
        if not is_rotary:
            to.drop(name, f"a {family} has no rotary positions")
    to.drop(
        "--no-position-embedding",
        "rotary positions need no table" if is_rotary else f"a {family} has positions",
    )
    if family == "mistral" and (found := re.findall(r"\d+", to.value("--window-size"))):
        to.put("model.sliding_window", int(found[0]) + 1, "--window-size")
    if not is_rotary:
        return
    if to.has("--rotary-base"):
        to.put("model.rope_theta", to.value("--rotary-base"), "--rotary-base")
    share = to.value("--rotary-percent", 1.0)
    if family == "gpt_neox":
        to.put("model.rotary_pct", share, "--rotary-percent")
        to.put("model.use_parallel_residual", False, "--position-embedding-type")
    elif share == 1:
        to.say("--rotary-percent", TRANSLATED, "whole heads rotate") if to.has("--rotary-percent") else None
    else:
        to.drop("--rotary-percent", f"changes the model: a {family} rotates whole heads")
    if to.is_on("--use-rope-scaling"):
        factor = to.value("--rope-scaling-factor", 8.0)
        scaling = {"rope_type": "llama3", "factor": factor, **_LLAMA_3_ROPE}
        to.put("model.rope_scaling", scaling, "--use-rope-scaling", "--rope-scaling-factor")
    elif to.has("--rotary-seq-len-interpolation-factor"):
        factor = float(to.value("--rotary-seq-len-interpolation-factor"))
        to.put(
            "model.rope_scaling",
            {"rope_type": "linear", "factor": factor},
            "--rotary-seq-len-interpolation-factor",
        )


def put_vocabulary(to: Translation) -> None:
    """Set the tokenizer and the padding of the vocabulary."""
    types = {"GPT2BPETokenizer": "--vocab-file", "HuggingFaceTokenizer": "--tokenizer-model"}
    kind = to.value("--tokenizer-type", "GPT2BPETokenizer" if to.has("--vocab-file") else "")
    name = types.get(kind, "--tokenizer-model")
    name = next((one for one in (name, "--tokenizer-name-or-path", "--vocab-file") if to.has(one)), "")
    size = to.value("--pad-vocab-size-to") or to.value("--vocab-size")
    put_tokenizer(to, to.value(name) if name else "", size, name, "--tokenizer-type", "--merge-file")
    for one in ("--pad-vocab-size-to", "--vocab-size"):
        if to.has(one):
            to.say(one, TRANSLATED, f"model.vocab_size = {size}")
    multiple = to.value("--make-vocab-size-divisible-by", 128) * to.value("--tensor-model-parallel-size", 1)
    if to.has("--pad-vocab-size-to") and size % multiple:
        to.drop("--make-vocab-size-divisible-by", "--pad-vocab-size-to gives the rows")
    else:
        to.put("model.vocab_multiple", multiple, "--make-vocab-size-divisible-by")
