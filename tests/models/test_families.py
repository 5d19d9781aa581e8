"""Reading published config.json files, in both spellings, and refusing what cannot be done."""

import json
import subprocess
import sys

import pytest

from kielo.models import families
from kielo.models.llama import count
from kielo.recipe.errors import KieloError

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
SIZE_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}


def read(tmp_path, config: dict):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return families.read_hf_config(tmp_path)


def test_published_sizes(tmp_path) -> None:
    """Llama 3.1's config files give the parameter counts that its weight files have."""
    assert count.parameters(read(tmp_path, LLAMA_3_1_8B)) == 8_030_261_248
    assert count.parameters(read(tmp_path, LLAMA_3_1_8B | SIZE_70B)) == 70_553_706_496


def test_spellings_of_rope_mean_one_thing(tmp_path) -> None:
    """transformers 4 (rope_scaling beside rope_theta, `type`) and 5 (rope_parameters) read as the same model."""
    four = read(tmp_path, LLAMA_3_1_8B)
    new = {key: value for key, value in LLAMA_3_1_8B.items() if key not in ("rope_theta", "rope_scaling")}
    five = read(tmp_path, new | {"rope_parameters": LLAMA_3_1_8B["rope_scaling"] | {"rope_theta": 500000.0}})
    assert four == five and four.rope_theta == 500000.0 and four.rope_scaling["factor"] == 8.0
    plain = read(tmp_path, new | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})
    assert plain.rope_scaling is None and plain.rope_theta == 7.0
    old = read(tmp_path, LLAMA_3_1_8B | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert old.rope_scaling == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mistral"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type"),
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


def test_tables_need_no_torch() -> None:
    """A login node reads families, counts, names and layouts without torch."""
    program = (
        "import sys; from kielo.models import families; "
        "[families.module('llama', part) for part in ('count', 'layout', 'names')]; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
