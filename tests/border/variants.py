"""Odd folders of models as people have them: changes of the files that transformers saved for a tiny model.

Each entry of VARIANTS is a kind. It changes config.json (a dictionary) or the tensors, and may choose how the
tensors are stored. Nothing here knows what Kielo does with them.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


@dataclass
class Files:
    """A folder before it is written. stores: what writes the tensors. texts: other files by name."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    chance: random.Random
    stores: Callable[[Path, "Files"], None] = lambda folder, files: one_file(folder, files.tensors)
    texts: dict[str, str] = field(default_factory=dict)

    def name(self, *endings: str) -> str:
        """Return a tensor whose name ends so; any tensor without endings or if none does."""
        found = [name for name in self.tensors if name.endswith(endings or "")] or list(self.tensors)
        return self.chance.choice(sorted(found))

    @property
    def head(self) -> str:
        """The name of the output matrix, stored or not."""
        named = {"gpt_neox": "embed_out.weight", "modernbert": "decoder.weight"}
        return named.get(self.config["model_type"], "lm_head.weight")

    @property
    def embedding(self) -> str:
        endings = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
        found = [name for name in self.tensors if name.endswith((*endings, "tok_embeddings.weight"))]
        return found[0] if found else next(iter(self.tensors))

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        for name, text in self.texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        self.stores(folder, self)


def read(folder: Path, chance: random.Random) -> Files:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Files(config, load_file(folder / "model.safetensors"), chance)


def one_file(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> None:
    save_file(
        {key: tensor.contiguous().clone() for key, tensor in tensors.items()}, folder / name, {"format": "pt"}
    )


def _with_config(**changes: Any) -> Callable[[Files], None]:
    return lambda files: files.config.update(changes)


def _without_config(*keys: str) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        for key in keys:
            files.config.pop(key, None)

    return change


# How tensors are stored


def _scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return (tensor.double() * scale).to(tensor.dtype)  # fp8 has no arithmetic


def _shards(folder: Path, files: Files, scale: float = 1.0) -> None:
    names = sorted(files.tensors)
    where = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        shard = f"model-{number:05}-of-00002.safetensors"
        one_file(folder, {name: _scaled(files.tensors[name], scale) for name in part}, shard)
        where |= dict.fromkeys(part, shard)
    size = sum(tensor.nbytes for tensor in files.tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _bin(folder: Path, files: Files, scale: float = 1.0) -> None:
    scaled = {name: _scaled(tensor, scale) for name, tensor in files.tensors.items()}
    torch.save(scaled, folder / "pytorch_model.bin")


def _stored(how: Callable[[Path, Files], None]) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files.stores = how

    return change


def _old_shards_beside(folder: Path, files: Files) -> None:
    _shards(folder, files, scale=0.5)
    one_file(folder, files.tensors)


def _old_bin_beside(folder: Path, files: Files) -> None:
    _bin(folder, files, scale=0.5)
    one_file(folder, files.tensors)


def _old_bin_beside_shards(folder: Path, files: Files) -> None:
    _bin(folder, files, scale=0.5)
    _shards(folder, files)


def _a_shard_is_missing(folder: Path, files: Files) -> None:
    _shards(folder, files)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _without_metadata(folder: Path, files: Files) -> None:
    save_file({name: tensor.clone() for name, tensor in files.tensors.items()}, folder / "model.safetensors")


# Tensors


def _cast(dtype: torch.dtype) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files.tensors = {name: tensor.to(dtype) for name, tensor in files.tensors.items()}

    return change


def _mixed_dtypes(files: Files) -> None:
    for name in sorted(files.tensors)[::2]:
        files.tensors[name] = files.tensors[name].bfloat16()


def _one_of(dtype: torch.dtype) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        name = files.name("weight")
        files.tensors[name] = files.tensors[name].to(dtype)

    return change


def _tied_without_head(files: Files) -> None:
    files.config["tie_word_embeddings"] = True
    files.tensors.pop(files.head, None)


def _tied_with_equal_head(files: Files) -> None:
    files.config["tie_word_embeddings"] = True
    files.tensors[files.head] = files.tensors[files.embedding].clone()


def _tied_with_another_head(files: Files) -> None:
    files.config["tie_word_embeddings"] = True
    files.tensors[files.head] = files.tensors[files.embedding].flip(0).contiguous()


def _tied_with_the_head_alone(files: Files) -> None:
    _tied_with_equal_head(files)
    del files.tensors[files.embedding]


def _untied_without_head(files: Files) -> None:
    files.config["tie_word_embeddings"] = False
    files.tensors.pop(files.head, None)


def _bare_names(files: Files) -> None:
    prefixes = ("model.", "transformer.", "gpt_neox.")
    prefix = next((one for one in prefixes if any(name.startswith(one) for name in files.tensors)), "")
    files.tensors = {name.removeprefix(prefix): tensor for name, tensor in files.tensors.items()}


def _another_prefix(files: Files) -> None:
    files.tensors = {f"module.{name}": tensor for name, tensor in files.tensors.items()}


def _add(name: str, *shape: int) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files.tensors[name] = torch.full(shape, 0.25)

    return change


def _rotary_buffers(files: Files) -> None:
    files.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


def _bias_of_a_projection(files: Files) -> None:
    name = files.name("o_proj.weight", "c_proj.weight", "dense.weight", "Wo.weight")
    files.tensors[name.removesuffix("weight") + "bias"] = torch.full((files.tensors[name].shape[0],), 0.25)


def _without_a_tensor(files: Files) -> None:
    del files.tensors[files.name()]


def _more_rows(files: Files) -> None:
    """An embedding that was padded without a word to config.json."""
    table = files.tensors[files.embedding]
    files.tensors[files.embedding] = torch.cat([table, torch.zeros(31, table.shape[1])])


def _other_shape(files: Files) -> None:
    name = files.name("weight")
    files.tensors[name] = files.tensors[name].flatten()[:-1]


def _not_finite(value: float) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files.tensors[files.name("weight")].view(-1)[0] = value

    return change


# config.json


def _layers(by: int) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        key = "n_layer" if "n_layer" in files.config else "num_hidden_layers"
        files.config[key] += by
        files.config.pop("layer_types", None)

    return change


def _as_transformers_4_wrote_it(files: Files) -> None:
    config = files.config
    config["torch_dtype"] = config.pop("dtype", "float32")
    rope = config.pop("rope_parameters", None)
    if rope and "rope_theta" in rope:
        config["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type", "default")
        config["rope_scaling"] = None if kind == "default" else {"type": kind, "rope_type": kind, **rope}
    elif rope:
        config["rope_parameters"] = rope


def _rope(**scaling: Any) -> Callable[[Files], None]:
    """Scaling as transformers 4 wrote it; families without RoPE get the key too."""

    def change(files: Files) -> None:
        rope = files.config.pop("rope_parameters", None) or {}
        if "rope_theta" in rope:
            files.config["rope_theta"] = rope["rope_theta"]
        files.config["rope_scaling"] = dict(scaling)

    return change


def _base_beside_its_table(files: Files) -> None:
    files.config["rope_theta"] = 77.0


def _trained_length_beside(files: Files) -> None:
    _rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)(files)
    files.config["original_max_position_embeddings"] = 16


def _numbers_as_words(files: Files) -> None:
    key = files.chance.choice(
        [key for key in files.config if key.endswith(("eps", "epsilon"))] or ["dropout"]
    )
    files.config[key] = "1e-5"


def _renamed(files: Files) -> None:
    """The type of a sibling, as people write it to run a model in another program."""
    siblings = {"llama": "mistral", "mistral": "llama", "qwen2": "llama", "qwen3": "qwen2", "olmo2": "olmo3"}
    files.config["model_type"] = siblings.get(files.config["model_type"], "llama")


def _nested(files: Files) -> None:
    files.config = {"model_type": files.config["model_type"], "text_config": files.config}


def _windows(files: Files) -> None:
    number = files.config.get("num_hidden_layers", 2)
    files.config |= {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}
    files.config["layer_types"] = ["sliding_attention"] * number


def _fewer_positions(files: Files) -> None:
    key = "n_positions" if "n_positions" in files.config else "max_position_embeddings"
    files.config[key] = 8


_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")
VARIANTS: dict[str, Callable[[Files], None]] = {
    "nothing": lambda files: None,
    "shards": _stored(_shards),
    "pickled": _stored(_bin),
    "old shards beside one file": _stored(_old_shards_beside),
    "old pickled file beside one file": _stored(_old_bin_beside),
    "old pickled file beside shards": _stored(_old_bin_beside_shards),
    "a shard is missing": _stored(_a_shard_is_missing),
    "no metadata": _stored(_without_metadata),
    "fp16": _cast(torch.float16),
    "bf16": _cast(torch.bfloat16),
    "fp64": _cast(torch.float64),
    "mixed dtypes": _mixed_dtypes,
    "one tensor in int8": _one_of(torch.int8),
    "one tensor in fp8": _one_of(torch.float8_e4m3fn),
    "tied, no head": _tied_without_head,
    "tied, an equal head": _tied_with_equal_head,
    "tied, another head": _tied_with_another_head,
    "tied, the head alone": _tied_with_the_head_alone,
    "untied, no head": _untied_without_head,
    "names of the bare model": _bare_names,
    "names with a prefix": _another_prefix,
    "buffers of rotary positions": _rotary_buffers,
    "a tensor of nobody": _add("adapter.weight", 3, 3),
    "a bias of the head": _add("lm_head.bias", 97),
    "a bias that no key announces": _bias_of_a_projection,
    "a tensor is missing": _without_a_tensor,
    "more rows than tokens": _more_rows,
    "another shape": _other_shape,
    "a NaN": _not_finite(float("nan")),
    "an infinity": _not_finite(float("inf")),
    "one layer less": _layers(-1),
    "one layer more": _layers(1),
    "transformers 4": _as_transformers_4_wrote_it,
    "linear rope": _rope(rope_type="linear", factor=2.0),
    "linear rope, type": _rope(type="linear", factor=2.0),
    "dynamic rope": _rope(rope_type="dynamic", factor=2.0),
    "yarn": _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "yarn with mscale": _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7),
    "llama3 rope": _rope(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "longrope": _rope(
        rope_type="longrope", factor=2.0, short_factor=[1.0] * 4, long_factor=[2.0] * 4,
        original_max_position_embeddings=16,
    ),
    "a trained length beside the scaling": _trained_length_beside,
    "a base beside its table": _base_beside_its_table,
    "no base": _without_config("rope_parameters", "rope_theta"),
    "half of each head turns": _with_config(partial_rotary_factor=0.5),
    "another activation": _with_config(**dict.fromkeys(_ACTIVATIONS, "gelu")),
    "no heads of keys": _without_config("num_key_value_heads"),
    "narrow heads": _with_config(head_dim=4),
    "no width of heads": _with_config(head_dim=None),
    "biases of attention": _with_config(attention_bias=True),
    "biases of the MLP": _with_config(mlp_bias=True),
    "dropout": _with_config(attention_dropout=0.1, hidden_dropout=0.1, resid_pdrop=0.1),
    "windows": _windows,
    "both directions": _with_config(use_bidirectional_attention=True),
    "not causal": _with_config(is_causal=False),
    "capped logits": _with_config(final_logit_softcapping=5.0),
    "scaled scores": _with_config(query_pre_attn_scalar=64, attention_multiplier=0.5),
    "another epsilon": _with_config(**dict.fromkeys(_EPSILONS, 1e-2)),
    "an epsilon in words": _numbers_as_words,
    "no epsilon": _without_config(*_EPSILONS),
    "tying left out": _without_config("tie_word_embeddings"),
    "quantised": _with_config(quantization_config={"quant_method": "gptq", "bits": 4}),
    "another class": _with_config(architectures=["BertForPreTraining"]),
    "a list of two classes": _with_config(architectures=["LlamaModel", "LlamaForCausalLM"]),
    "no class": _without_config("architectures"),
    "a sibling's type": _renamed,
    "a nested config": _nested,
    "code of its own": _with_config(auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"}),
    "a key of nobody": _with_config(unsloth_version="2025.3"),
    "dtype fp16": _with_config(dtype="float16", torch_dtype="float16"),
    "pretraining_tp": _with_config(pretraining_tp=2),
    "fewer tokens than rows": _with_config(vocab_size=90),
    "fewer positions": _fewer_positions,
    "an adapter beside": lambda files: files.texts.update(
        {"adapter_config.json": json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x/y"})}
    ),
}  # fmt: skip
