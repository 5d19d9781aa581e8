"""Reading published config.json files, in both spellings, and refusing what cannot be done."""

import json
import math
import subprocess
import sys
from typing import Any

import pytest
from transformers import AutoConfig

from kielo.models import families
from kielo.models.parameter_shapes import parameter_shapes, parameters
from kielo.models.rope_scaling import normalise_rope
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Model

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
SIZE_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}

# google/gemma-3-1b-pt and allenai/Olmo-3-1025-7B (without its list of layer types, which is the default),
# shortened.
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
OLMO_3_7B = {
    "architectures": ["Olmo3ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "vocab_size": 100278,
}

# EleutherAI/gpt-neox-20b and bigscience/bloom, shortened.
GPT_NEOX_20B = {
    "architectures": ["GPTNeoXForCausalLM"],
    "attention_probs_dropout_prob": 0,
    "hidden_act": "gelu_fast",
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "vocab_size": 50432,
}
BLOOM_176B = {
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["BloomForCausalLM"],
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "model_type": "bloom",
    "n_embed": 14336,
    "n_layer": 70,
    "num_attention_heads": 112,
    "pretraining_tp": 4,
    "slow_but_exact": False,
    "vocab_size": 250880,
}


def read(tmp_path, config: dict):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return families.read_hf_config(tmp_path)


def test_published_sizes(tmp_path) -> None:
    """Llama 3.1's config files give the parameter counts that its weight files have."""
    assert parameters(read(tmp_path, LLAMA_3_1_8B)) == 8_030_261_248
    assert parameters(read(tmp_path, LLAMA_3_1_8B | SIZE_70B)) == 70_553_706_496


def test_spellings_of_rope_mean_one_thing(tmp_path) -> None:
    """transformers 4 (rope_scaling beside rope_theta,
    `type`) and 5 (rope_parameters) read as the same model.
    """
    four = read(tmp_path, LLAMA_3_1_8B)
    new = {key: value for key, value in LLAMA_3_1_8B.items() if key not in ("rope_theta", "rope_scaling")}
    five = read(tmp_path, new | {"rope_parameters": LLAMA_3_1_8B["rope_scaling"] | {"rope_theta": 500000.0}})
    assert four == five and four.rope_theta == 500000.0 and four.rope_scaling["factor"] == 8.0
    plain = read(tmp_path, new | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})
    assert plain.rope_scaling is None and plain.rope_theta == 7.0
    old = read(tmp_path, LLAMA_3_1_8B | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert old.rope_scaling == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("published", [GEMMA_3_1B, OLMO_3_7B], ids=lambda config: config["model_type"])
def test_bases_by_kind_of_layer_mean_one_thing(tmp_path, published: dict) -> None:
    """Published files of transformers 4 and what transformers 5 makes of them are the same model: windows in
    all but every 6th or 4th layer, two bases or scaled full layers alone.
    """
    four = read(tmp_path, published)
    AutoConfig.for_model(**published).save_pretrained(tmp_path)
    assert "full_attention" in json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    assert families.read_hf_config(tmp_path) == four
    is_gemma = published is GEMMA_3_1B
    assert four.layer_types[0] == "sliding_attention"
    assert four.layer_types.count("full_attention") == (4 if is_gemma else 8)
    assert (four.rope_theta, four.sliding_window) == ((1e6, 512) if is_gemma else (5e5, 4096))
    assert four.rope_local_base_freq == 1e4 and (four.rope_scaling is None) == is_gemma


@pytest.mark.parametrize(
    ("published", "expected"),
    [(GPT_NEOX_20B, 20_554_567_680), (BLOOM_176B, 176_247_271_424)],
    ids=["gpt_neox", "bloom"],
)
def test_old_files_of_fused_families_are_read(tmp_path, published: dict, expected: int) -> None:
    """Published files of transformers 4 and what transformers 5 makes of them are the same model,
    of the known size.
    """
    four = read(tmp_path, published)
    AutoConfig.for_model(**published).save_pretrained(tmp_path)
    assert families.read_hf_config(tmp_path) == four
    assert parameters(four) == expected
    assert four.max_position_embeddings == 2048 and four.rotary_pct == (
        0.25 if published is GPT_NEOX_20B else 1.0
    )
    assert read(tmp_path, BLOOM_176B | {"seq_length": 4096}).max_position_embeddings == 4096
    with pytest.raises(KieloError, match=r"not supported: apply_residual_connection_post_layernorm = True"):
        read(tmp_path, BLOOM_176B | {"apply_residual_connection_post_layernorm": True})


IN_TRANSFORMERS = [name for name, family in families.FAMILIES.items() if family.in_transformers]


class KeysRead(dict):
    """A config that notes which of its keys are looked at."""

    def __init__(self, *content: Any):
        super().__init__(*content)
        self.looked_at: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.looked_at.add(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.looked_at.add(key)
        return super().get(key, default)


# Of a key that decides what others mean.
_IN_USE = {"use_sliding_window": True, "max_window_layers": 1}
# A model of its own for each family, with no value that transformers would take; in both spellings of RoPE.
_FULL = {
    "hidden_size": 256, "n_embd": 256, "n_embed": 256, "vocab_size": 97, "intermediate_size": 48,
    "n_inner": 48, "ffn_dim": 48,
    "num_hidden_layers": 8, "n_layer": 8, "num_attention_heads": 32, "n_head": 32, "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 40, "n_positions": 40, "seq_length": 2048, "rms_norm_eps": 1e-3,
    "layer_norm_epsilon": 1e-3,
    "layer_norm_eps": 1e-3, "initializer_range": 0.3, "init_std": 0.3, "sliding_window": 9,
    "query_pre_attn_scalar": 77,
    "norm_eps": 1e-3, "local_attention": 18, "global_attn_every_n_layers": 2, "mlp_bias": True,
    "global_rope_theta": 3e5, "local_rope_theta": 2e3,
    "rotary_emb_base": 5e3, "rotary_pct": 0.5, "rope_theta": 5e5, "rope_local_base_freq": 2e3,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "final_logit_softcapping": 7.0,
    "word_embed_proj_dim": 256,
} | _IN_USE  # fmt: skip
# Shapes that others must fit: without one of these the others go too.
_SHAPES = {
    "hidden_size", "n_embd", "n_embed", "num_attention_heads", "n_head", "head_dim", "num_key_value_heads",
    "word_embed_proj_dim",
}  # fmt: skip


# Keys that these families refuse, because they have no such shapes.
_WITHOUT_GROUPS = {"gpt2", "opt", "gpt_neox", "bloom", "modernbert"}
_WITHOUT_WINDOWS = _WITHOUT_GROUPS | {"llama", "olmo2"}


def values_of(model_type: str) -> dict[str, Any]:
    """`_FULL` without the keys that the family refuses."""
    gone = {"num_key_value_heads", "head_dim"} if model_type in _WITHOUT_GROUPS else set()
    gone |= {"sliding_window"} if model_type in _WITHOUT_WINDOWS else set()
    gone |= {"rope_scaling"} if model_type == "modernbert" else set()
    return {key: value for key, value in _FULL.items() if key not in gone}


def keys_read(model_type: str) -> list[str]:
    """Every key of `_FULL` that the family looks at."""
    config = KeysRead({"model_type": model_type} | values_of(model_type))
    families.model_of_config(model_type, config, "config.json")
    return sorted(config.looked_at & _FULL.keys())


@pytest.mark.parametrize("model_type", IN_TRANSFORMERS)
def test_a_key_left_out_means_what_it_does_in_transformers(tmp_path, model_type: str) -> None:
    """Key by key, and all together: what transformers makes of the config, written out in full, is the same
    model. An OLMo 3 without rope_theta, which transformers 4 and 5 take for different models, is refused.
    """
    known = keys_read(model_type)
    assert len(known) >= 9
    full = {key: value for key, value in values_of(model_type).items() if key in known}
    for key in ["nothing", *known, "all"]:
        gone = set(known) if key == "all" else _SHAPES if key in _SHAPES else {key}
        given = {"model_type": model_type} | {name: value for name, value in full.items() if name not in gone}
        if model_type == "olmo3" and "rope_theta" in gone:
            with pytest.raises(KieloError, match="lacks rope_theta"):
                read(tmp_path, given)
            given["rope_theta"] = 5e5
        theirs = AutoConfig.for_model(**json.loads(json.dumps(given)))
        # transformers 5 gives windowed layers its own base where it reads the old spelling
        if model_type == "olmo3":
            theirs.rope_parameters["sliding_attention"]["rope_theta"] = 5e5
        written = theirs.to_dict() | {"architectures": None}
        assert read(tmp_path, given) == read(tmp_path, written), (key, given, written)


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "gpt_neox", "olmo2"])
def test_rope_scaling_goes_before_rope_parameters(tmp_path, model_type: str) -> None:
    """A config that has both is read as transformers reads it."""
    both = {
        "model_type": model_type, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e3},
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 8e3},
    }  # fmt: skip
    written = AutoConfig.for_model(**json.loads(json.dumps(both))).to_dict()
    ours = read(tmp_path, both)
    assert ours.rope_theta == 7e3 and ours == read(tmp_path, written | {"architectures": None})


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [("qwen2", "num_key_value_heads", 40), ("mistral", "sliding_window", None), ("mistral", "head_dim", 8)],
)
def test_null_is_not_left_out(tmp_path, model_type: str, key: str, value: int | None) -> None:
    """Null takes a window away and derives numbers of heads, where a key that is left out has a default."""
    given = {"model_type": model_type, "hidden_size": 320, "num_attention_heads": 40, key: None}
    assert getattr(read(tmp_path, given), key) == getattr(AutoConfig.for_model(**given), key) == value


def test_a_cap_left_out_is_the_familys_and_null_is_none(tmp_path) -> None:
    """Gemma 2's caps are 50 and 30 where its config.json has no such keys."""
    gemma = {key: value for key, value in GEMMA_3_1B.items() if not key.endswith("softcapping")}
    gemma |= {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    caps = [(model.attn_logit_softcapping, model.final_logit_softcapping) for model in (
        read(tmp_path, gemma),
        read(tmp_path, gemma | {"attn_logit_softcapping": None, "final_logit_softcapping": 9.0}),
    )]  # fmt: skip
    assert caps == [(50.0, 30.0), (None, 9.0)]


@pytest.mark.parametrize(
    ("published", "change", "named"),
    [
        (GEMMA_3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA_3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA_3_1B, {"hidden_activation": "gelu"}, "hidden_activation"),
        (GEMMA_3_1B, {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "sliding_attention"),
        (OLMO_3_7B, {"rope_parameters": OLMO_3_7B["rope_scaling"]}, "full_attention.rope_theta"),
        (OLMO_3_7B, {"rope_theta": None}, "rope_theta"),
        (
            OLMO_3_7B,
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5},
                "sliding_attention": {"rope_theta": 1e4}}},
            "10000 for sliding",
        ),
        (
            OLMO_3_7B,
            {"rope_parameters": dict.fromkeys(
                ("full_attention", "sliding_attention"),
                {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
            )},
            "sliding_attention has a scaling",
        ),
    ],
)  # fmt: skip
def test_refusals_of_two_kinds_of_layers(tmp_path, published: dict, change: dict, named: str) -> None:
    """Families with windowed and full layers refuse as those below."""
    with pytest.raises(KieloError, match=named) as error:
        read(tmp_path, published | change)
    assert "config.json" in str(error.value)


def test_keys_of_another_family_are_refused() -> None:
    """A [model] section may not ask for what its family would pass over in silence."""
    for model_type, key, value in (
        ("llama", "final_logit_softcapping", 30.0), ("olmo2", "sliding_window", 8),
        ("olmo3", "mlp_bias", True),
        ("gemma3_text", "attn_logit_softcapping", 50.0), ("gemma2", "rope_local_base_freq", 5.0),
        ("gemma2", "hidden_act", "silu"), ("olmo3", "query_pre_attn_scalar", 64.0),
        ("llama", "rotary_pct", 0.5), ("llama", "position_heads", "interleaved"),
        ("ltg_bert", "tie_word_embeddings", False), ("ltg_bert", "hidden_act", "silu"),
        ("gpt_neox", "rotary_pct", 0.1), ("gpt_neox", "sliding_window", 8),
        ("bloom", "intermediate_size", 99),
        ("bloom", "hidden_act", "gelu"), ("bloom", "head_dim", 8), ("bloom", "num_key_value_heads", 2),
    ):  # fmt: skip
        model = families.complete(Model(model_type=model_type, vocab_size=9, **{key: value}), 16)
        with pytest.raises(KieloError, match=f"model.{key}"):
            families.check(model)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "gemma3"}, "gemma3_text"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"vocab_size": None}, "vocab_size"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    ],
)
def test_refusals_name_file_and_key(tmp_path, change: dict, named: str) -> None:
    """A config that asks for what Kielo does not do is refused, naming the file and the key."""
    with pytest.raises(KieloError, match=named) as error:
        read(tmp_path, LLAMA_3_1_8B | change)
    assert "config.json" in str(error.value)


def test_a_file_that_is_no_config_is_told(tmp_path) -> None:
    """Each with the path of the file, and the families that there are."""
    known = ", ".join(families.FAMILIES)
    path = tmp_path / "config.json"
    for content, told in (
        (None, "cannot be read (No such file or directory): expected a Hugging Face config.json"),
        ("[]", "contains a list, not the keys and values of a model"),
        ("{}", f"model_type = None is not known. Fix: one of {known}"),
        ('{"model_type": ["llama"]}', f"model_type = ['llama'] is not known. Fix: one of {known}"),
        ('{"model_type": "mamba"}', f"model_type = 'mamba' is not known. Fix: one of {known}"),
        ('{"architectures": ["MyBert"]}', f"model_type = None is not known. Fix: one of {known}"),
        ('{"model_type": "llama", "head_dim": 7}', "model.head_dim = 7 is odd; rotary positions need pairs"),
    ):
        if content is not None:
            path.write_text(content)
        with pytest.raises(KieloError) as caught:
            families.read_hf_config(path)
        assert str(caught.value) == f"{path}: {told}"
    for content in ("{", "nothing"):
        path.write_text(content)
        with pytest.raises(KieloError, match=r"config\.json: not valid JSON \(Expecting"):
            families.read_hf_config(tmp_path)
    with pytest.raises(KieloError) as caught:
        families.module("mamba", "tables")
    assert str(caught.value) == f"model.model_type = 'mamba' is not known. Fix: one of {known}"


def test_tables_need_no_torch() -> None:
    """A login node reads families, counts, names and tensor-parallel plans without torch."""
    program = (
        "import sys; from kielo.models import families; "
        "families.module('llama', 'tables'); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("model_type", families.FAMILIES)
def test_the_parts_of_a_layer_are_those_of_its_parameters(model_type):
    """`layer_parts`, from which the planner counts, names as many matrices and norms as the layers have,
    and where they are.
    """
    asked = Model(
        model_type=model_type,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=96,
        num_hidden_layers=2,
        vocab_size=99,
    )
    config = families.complete(asked, 32)
    parts = families.module(model_type, "tables").layer_parts(config)
    names = [
        name.removeprefix("layers.1.") for name in parameter_shapes(config) if name.startswith("layers.1.")
    ]
    weights = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    assert parts.mlp_matrices == sum(name.startswith("mlp.") for name in weights if not name.endswith("norm"))
    assert parts.has_head_norms == ("attention.q_norm" in weights)
    if model_type in IN_TRANSFORMERS:  # others have norms without weights
        norms = [name for name in weights if name.endswith("norm") and not name.startswith("attention.")]
        assert parts.norms == len(norms) and parts.norms_inputs == ("attention_norm" in weights)


@pytest.mark.parametrize(
    ("model_type", "change", "width"),
    [
        *((name, {}, 40) for name in ("llama", "mistral", "qwen2")),
        *((name, {"head_dim": None}, 40) for name in ("llama", "mistral", "qwen2")),
        *((name, {"head_dim": 24}, 24) for name in ("llama", "mistral", "qwen2", "qwen3")),
        ("qwen3", {}, 128),
    ],
)  # fmt: skip
def test_the_width_of_heads_is_given_or_the_familys(
    tmp_path, model_type: str, change: dict, width: int
) -> None:
    """A Qwen 3's is 128 where it is left out, whatever the hidden size; others divide that by their heads."""
    config = {
        "model_type": model_type,
        "hidden_size": 320,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    assert read(tmp_path, config | change).head_dim == width
    with pytest.raises(KieloError, match="head_dim = null does not fit"):
        read(tmp_path, config | {"model_type": "qwen3", "head_dim": None})


FACTOR = 0.1 * math.log(4) + 1


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        ({"beta_fast": 0, "beta_slow": None}, {}),  # as if they were not given
        ({"beta_fast": 16, "beta_slow": 2}, {"beta_fast": 16, "beta_slow": 2}),
        ({"factor": 0.5}, {"factor": 0.5, "attention_factor": 1.0}),
        ({"attention_factor": 1.5}, {"attention_factor": 1.5}),
        ({"mscale": 2.0}, {}),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, {"attention_factor": (0.2 * math.log(4) + 1) / FACTOR}),
        ({"original_max_position_embeddings": 512}, {"original_max_position_embeddings": 512}),
    ],
)
def test_missing_numbers_of_yarn_are_those_of_the_paper(given: dict, changed: dict) -> None:
    """0.1 ln(factor) + 1 for attention, 32 and 1 for the betas, and the length that the model has."""
    scaling = {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048,
        "attention_factor": FACTOR, "beta_fast": 32, "beta_slow": 1,
    }  # fmt: skip
    asked = {"type": "yarn", "factor": 4.0, "truncate": True} | given
    base, found = normalise_rope(5e5, asked, 2048)
    assert base == 5e5 and found == {key: pytest.approx(value) if isinstance(value, float) else value
                                     for key, value in (scaling | changed).items()}  # fmt: skip
