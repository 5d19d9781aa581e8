"""Every family, every key: config.json is read without gaps, and an export loses no key of [model]."""

import json
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kielo.models import families
from kielo.models.config_keys import read_config
from kielo.recipe.errors import KieloError
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import Model
from kielo.resolve.complete_model import overridden_in_words

IN_TRANSFORMERS = [name for name, family in FAMILIES.items() if family.in_transformers]
TWO_KINDS = ("gemma3_text", "olmo3", "modernbert")


def written_by_transformers(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a default model, as transformers 5 writes it, with changes afterwards."""
    return json.loads(json.dumps(AutoConfig.for_model(model_type).to_dict())) | changes


@pytest.mark.parametrize("model_type", IN_TRANSFORMERS)
def test_every_key_of_transformers_is_known(model_type: str) -> None:
    """Each attribute of transformers' config class is read, refused by value, or known to change nothing."""
    _, unknown = read_config(
        families.config_entries(model_type), written_by_transformers(model_type), model_type, "config.json"
    )
    assert unknown == []
    given = written_by_transformers(model_type, unsloth_version="2025.3")
    _, unknown = read_config(families.config_entries(model_type), given, model_type, "config.json")
    assert unknown == ["unsloth_version"]


OTHER_MATHS = [
    ("gemma3_text", "use_bidirectional_attention", True),
    ("gemma3_text", "query_pre_attn_scalar", None),
    ("gemma3_text", "hidden_activation", "silu"),
    ("olmo3", "hidden_act", "gelu"),
    *((model_type, "architectures", ["BertForPreTraining"]) for model_type in TWO_KINDS),
    *((model_type, "attention_dropout", 0.1) for model_type in TWO_KINDS),
    *((model_type, "layer_types", ["full_attention"]) for model_type in TWO_KINDS),
    *((model_type, "quantization_config", {"bits": 4}) for model_type in TWO_KINDS),
    *((model_type, "partial_rotary_factor", 0.5) for model_type in TWO_KINDS),
    *((model_type, "rope_scaling", {"rope_type": "linear", "factor": 2.0}) for model_type in TWO_KINDS),
    *((model_type, "rms_norm_eps", "1e-6") for model_type in ("gemma3_text", "olmo3")),
    ("modernbert", "norm_eps", "1e-5"),
    ("modernbert", "sliding_window", 32),
]


@pytest.mark.parametrize(("model_type", "key", "value"), OTHER_MATHS)
def test_a_wrong_key_beside_rope_of_each_kind_of_layer_is_refused(
    tmp_path, model_type: str, key: str, value: Any
) -> None:
    """transformers 5 writes `rope_parameters` by kind of layer; all other keys still count."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(written_by_transformers(model_type)), encoding="utf-8")
    assert families.read_hf_config(path).model_type == model_type
    path.write_text(json.dumps(written_by_transformers(model_type, **{key: value})), encoding="utf-8")
    with pytest.raises(KieloError, match=f"config.json: .*{key}"):
        families.read_hf_config(path)


SHAPE = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
# A value of each key of [model] that is another one than each family's usual one, where there is a choice.
VALUES: list[dict[str, Any]] = [
    {"intermediate_size": 40}, {"num_key_value_heads": 2}, {"head_dim": 8}, {"rms_norm_eps": 3e-4},
    {"layer_norm_epsilon": 3e-4}, {"rope_theta": 3e4},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_local_base_freq": 3e3}, {"rotary_pct": 0.5}, {"tie_word_embeddings": True},
    {"tie_word_embeddings": False}, {"attention_bias": True}, {"attention_bias": False}, {"mlp_bias": True},
    {"mlp_bias": False},
    *({"hidden_act": name} for name in ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")),
    {"sliding_window": 9}, {"layer_types": ("full_attention", "full_attention")},
    {"sliding_window": 9, "layer_types": ("sliding_attention", "full_attention")},
    {"query_pre_attn_scalar": 20.0}, {"attn_logit_softcapping": 9.0}, {"final_logit_softcapping": 9.0},
    {"use_parallel_residual": False}, {"position_bucket_size": 8}, {"position_heads": "interleaved"},
    {"initializer_range": 0.3},
]  # fmt: skip
NAMES_OF_ONE_FUNCTION = {"gelu_new", "gelu_fast", "gelu_pytorch_tanh"}


def plain(model: Model) -> dict[str, Any]:
    """Return the values that decide a model's logits, each in one spelling."""
    found = model.model_dump()
    if found["hidden_act"] in NAMES_OF_ONE_FUNCTION:
        found["hidden_act"] = "tanh gelu"
    if found["query_pre_attn_scalar"] is None and model.model_type.startswith("gemma"):
        found["query_pre_attn_scalar"] = found["head_dim"]
    kind = "full_attention" if model.sliding_window is None else "sliding_attention"
    found["layer_types"] = model.layer_types or (kind,) * model.num_hidden_layers
    if model.model_type == "modernbert" and model.layer_types is None:
        found["layer_types"] = ("full_attention", "sliding_attention")
    if "sliding_attention" not in found["layer_types"]:
        found["sliding_window"] = None
    return found


@pytest.mark.parametrize("model_type", IN_TRANSFORMERS)
@pytest.mark.parametrize("given", VALUES, ids=str)
def test_a_key_of_a_model_is_in_its_export_or_refused(model_type: str, given: dict[str, Any]) -> None:
    """What transformers makes of the export, written out in full, is the same model."""
    model = families.complete(Model(model_type=model_type, **SHAPE | given), 64)
    refused = list(families.model_complaints(model))
    if refused:
        assert all(complaint.startswith("model.") for complaint in refused)
        assert any(f"model.{key} " in complaint for key in given for complaint in refused)
        return
    theirs = AutoConfig.for_model(**families.hf_config(model)).to_dict()
    back = families.model_of_config(model_type, theirs | {"architectures": None}, "config.json")
    assert plain(back) == plain(model)


def test_most_keys_are_refused_by_the_families_without_them() -> None:
    """The cases that trained one model and exported another."""
    for model_type, given in (
        ("llama", {"sliding_window": 9}), ("mistral", VALUES[22]), ("mistral", {"attention_bias": True}),
        ("mistral", {"mlp_bias": True}), ("qwen2", {"mlp_bias": True}), ("qwen3", {"mlp_bias": True}),
        ("modernbert", {"rms_norm_eps": 3e-4}), ("mistral", {"layer_norm_epsilon": 3e-4}),
        ("qwen2", {"attention_bias": False}), ("gpt2", {"rope_theta": 3e4}),
    ):  # fmt: skip
        model = families.complete(Model(model_type=model_type, **SHAPE | given), 64)
        assert list(families.model_complaints(model)), (model_type, given)


def test_keys_that_nobody_reads_are_shown(tmp_path) -> None:
    """They change nothing in transformers either, and are on the screen of `kielo show` and `kielo train`."""
    given = written_by_transformers("qwen2", unsloth_version="2025.3", my_note="x")
    (tmp_path / "config.json").write_text(json.dumps(given), encoding="utf-8")
    assert families.keys_passed_over(tmp_path) == ["my_note", "unsloth_version"]
    said = overridden_in_words(Model(weights=f"hf:{tmp_path}"))
    assert said == (
        "ignored keys of config.json, which qwen2 models have neither here nor in transformers: my_note, "
        "unsloth_version"
    )


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
TRAINED = "original_max_position_embeddings"


def frequencies(given: dict[str, Any]) -> Any:
    """Return the frequencies of transformers' RoPE for full layers."""
    config = AutoConfig.for_model(**json.loads(json.dumps(given)))
    kind = "full_attention" if given["model_type"] in TWO_KINDS else None
    return ROPE_INIT_FUNCTIONS[given["rope_scaling"]["rope_type"]](config, "cpu", layer_type=kind)[0]


@pytest.mark.parametrize("scaling", [LLAMA3, YARN], ids=["llama3", "yarn"])
@pytest.mark.parametrize("model_type", ["llama", "olmo2", "olmo3", "gemma3_text"])
def test_the_trained_length_beside_the_scaling(tmp_path, model_type: str, scaling: dict) -> None:
    """transformers reads it there in families with one RoPE. In the others it does not: refused."""
    plain = {"model_type": model_type, "rope_theta": 5e5, "max_position_embeddings": 64}
    beside = plain | {"rope_scaling": scaling, TRAINED: 8}
    inside = {length: plain | {"rope_scaling": scaling | {TRAINED: length}} for length in (8, 64)}
    assert not frequencies(inside[8]).equal(frequencies(inside[64]))
    assert frequencies(beside).equal(frequencies(inside[64 if model_type in TWO_KINDS else 8]))
    (tmp_path / "inside.json").write_text(json.dumps(inside[8]), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(beside), encoding="utf-8")
    if model_type in TWO_KINDS:
        assert families.read_hf_config(tmp_path / "inside.json").rope_scaling[TRAINED] == 8
        with pytest.raises(KieloError, match=f"{TRAINED} = 8 stands beside rope_scaling"):
            families.read_hf_config(tmp_path)
    else:
        assert families.read_hf_config(tmp_path) == families.read_hf_config(tmp_path / "inside.json")


@pytest.mark.parametrize("model_type", IN_TRANSFORMERS)
def test_a_mask_of_the_other_kind_is_refused(tmp_path, model_type: str) -> None:
    """transformers 5 makes its masks by `is_causal`, which no config class declares."""
    is_encoder = FAMILIES[model_type].is_encoder
    path = tmp_path / "config.json"
    path.write_text(json.dumps(written_by_transformers(model_type, rope_theta=5e5, is_causal=not is_encoder)))
    assert families.read_hf_config(path).model_type == model_type
    path.write_text(json.dumps(written_by_transformers(model_type, rope_theta=5e5, is_causal=is_encoder)))
    with pytest.raises(KieloError, match=f"is_causal = {is_encoder}"):
        families.read_hf_config(path)


@pytest.mark.parametrize("model_type", IN_TRANSFORMERS)
@pytest.mark.parametrize("value", [5, "x", [[1]], {"a": 1}], ids=str)
def test_damaged_values_are_refused_and_never_a_traceback(tmp_path, model_type: str, value: Any) -> None:
    """Every key of transformers' config class and some of other families, with a value that fits no key."""
    others = (
        "layer_types",
        "sliding_window",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "head_dim",
        TRAINED,
    )
    for key in {*written_by_transformers(model_type), *others}:
        if key in ("model_type", "transformers_version"):
            continue
        given = written_by_transformers(model_type, **{key: value})
        (tmp_path / "config.json").write_text(json.dumps(given), encoding="utf-8")
        try:
            families.read_hf_config(tmp_path)
        except KieloError as error:
            assert "config.json: " in str(error)


@pytest.mark.parametrize(("model_type", "has_biases"), [("qwen2", True), ("mistral", False)])
def test_biases_of_queries_that_no_key_of_transformers_changes(model_type: str, has_biases: bool) -> None:
    """Qwen 2 always has them and Mistral never, in transformers: the model says so, no other value fits."""
    assert families.family_defaults(model_type)["attention_bias"] is has_biases
    other = Model(model_type=model_type, **SHAPE, attention_bias=not has_biases)
    said = list(families.model_complaints(families.complete(other, 64)))
    assert len(said) == 1 and "attention_bias" in said[0]
