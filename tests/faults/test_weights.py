"""Weights and settings from elsewhere: damaged, odd, poisoned or hostile ones are refused by name, and every
export is valid.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from kielo.artifact.checkpoint_index import read_index, read_plain
from kielo.artifact.checkpoint_inspection import newest_checkpoint
from kielo.checkpoint import saving
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.models import families
from kielo.models.families import complete
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Model
from kielo.stages.attempt import train_here
from kielo.train import run as run_module
from kielo.train.watch.checks import refuse_unsound_weights
from tests.checkpoint.layouts import config as layouts_config
from tests.checkpoint.layouts import model_on_ranks
from tests.faults.trial import Outcome, belongings, kielo, refused, went_well
from tests.models.equality import our_logits, pair
from tests.started_ranks import run_ranks

Here = Callable[..., Outcome]
TINY = complete(Model(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=320,
    tie_word_embeddings=False, max_position_embeddings=64,
), 64)  # fmt: skip
EMBEDDING, NORM, DOWN = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.1.mlp.down_proj.weight",
)


def write_weights(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A Llama in Hugging Face form, of the vocabulary of the suite's tokenizer:
    config.json and model.safetensors.
    """
    model = families.complete(TINY, 64)
    torch.manual_seed(1)
    names = families.module("llama", "tables")
    parameters = dict(families.build_model(model).named_parameters())
    tensors = {
        piece.name: 0.02 * torch.randn(parameters[ours][: piece.rows].shape)
        for ours, piece in names.to_hugging_face(model).items()
    }
    tensors |= {
        name: torch.ones_like(value) for name, value in tensors.items() if name.endswith("norm.weight")
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(families.hf_config(model)))
    save_file({name: value.to(dtype) for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with `weights` in it."""
    write_weights(tmp_path / "place" / "weights")
    return tmp_path / "place"


@pytest.fixture(scope="session")
def _ready(tmp_path_factory: pytest.TempPathFactory, _packed: Path) -> Path:
    """A packed workplace with a ready tokenizer, as weights need it."""
    workplace = tmp_path_factory.mktemp("ready") / "workplace"
    workplace.mkdir()
    for name in ("text.txt", "tiny.toml"):
        shutil.copy(_packed / name, workplace)
    shutil.copytree(
        _packed / "run" / "tokenizer", workplace / "tok", ignore=shutil.ignore_patterns("manifest.json")
    )
    recipe = workplace / "tiny.toml"
    recipe.write_text(recipe.read_text().replace("vocab_size = 320\n", 'path = "tok"\n'))
    went_well(kielo(workplace, "run", "tiny.toml", "--to", "pack", timeout=300))
    return workplace


@pytest.fixture
def ready(tmp_path: Path, _ready: Path) -> Path:
    return Path(shutil.copytree(_ready, tmp_path / "ready"))


def change_config(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def change_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors[name])
    save_file(tensors, folder / "model.safetensors")


def shards(folder: Path, saved: Callable[..., Any] = save_file) -> dict[str, str]:
    """`model.safetensors` becomes two files and an index, whose weight_map is returned."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, ending = ("model", "safetensors") if saved is save_file else ("pytorch_model", "bin")
    weight_map = {name: f"{stem}-{number % 2}.{ending}" for number, name in enumerate(sorted(tensors))}
    for file in sorted(set(weight_map.values())):
        saved({name: value for name, value in tensors.items() if weight_map[name] == file}, folder / file)
    write_index(folder, {"metadata": {}, "weight_map": weight_map}, f"{stem}.{ending}.index.json")
    return weight_map


def write_index(folder: Path, content: Any, name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


# config.json

NO_MODEL = "not the keys and values of a model"
WHOLE_FILES = {
    "a list": "[1, 2]",
    "a number": "3",
    "a text": '"llama"',
    "null": "null",
    "nothing": "",
    "cut short": '{"model_type": "llama", "hidden',
    "of another encoding": '{"model_type": "llä"}'.encode("utf-16"),
    "nested without end": "[" * 100_000,
    "a number of 5000 digits": '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("case", WHOLE_FILES)
def test_a_config_that_is_no_config(place: Path, here: Here, case: str) -> None:
    """The file is named, and nothing is left behind."""
    content = WHOLE_FILES[case]
    told = NO_MODEL if case in ("a list", "a number", "a text", "null") else "not valid JSON"
    (place / "weights" / "config.json").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    before = belongings(place)
    refused(here(place, "verify", "round-trip", "hf:weights"), told, "weights/config.json")
    assert belongings(place) == before


NO_FIT, NO_MULTIPLE = "does not fit: expected", "is no multiple of model.num_key_value_heads"
# keys whose values are of the right kind, and not known here
ASKS = "not supported"
NOT_DONE = {
    "model_type": "is not known. Fix: one of", "hidden_act": ASKS, "architectures": ASKS,
    "quantization_config": ASKS,
}  # fmt: skip
BAD_VALUES: list[tuple[str, Any]] = [
    ("model_type", None), ("model_type", ["llama"]), ("model_type", {"a": 1}), ("model_type", 3),
    ("model_type", "mamba"),
    ("hidden_size", "16"), ("hidden_size", 0), ("hidden_size", -16), ("hidden_size", None),
    ("hidden_size", True),
    ("hidden_size", 16.5), ("hidden_size", [16]), ("hidden_size", 10**30), ("hidden_size", float("nan")),
    ("num_attention_heads", 0), ("num_attention_heads", 3), ("num_attention_heads", "two"),
    ("num_key_value_heads", 0), ("num_key_value_heads", 3), ("num_key_value_heads", "x"),
    ("num_hidden_layers", -1),
    ("num_hidden_layers", 10**6), ("num_hidden_layers", {}), ("intermediate_size", 1.0),
    ("vocab_size", False),
    ("max_position_embeddings", "64"), ("max_position_embeddings", 10**12), ("rms_norm_eps", "1e-6"),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", float("inf")), ("rope_theta", "x"), ("rope_theta", 0), ("rope_theta", True),
    ("rope_theta", 10**400),
    ("tie_word_embeddings", "yes"), ("tie_word_embeddings", 1), ("attention_bias", None), ("head_dim", 7),
    ("head_dim", "8"),
    ("hidden_act", ["silu"]), ("architectures", "LlamaForCausalLM"), ("initializer_range", -1),
    ("quantization_config", {"bits": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BAD_VALUES, ids=lambda value: str(value)[:24])
def test_a_value_of_another_kind(place: Path, here: Here, key: str, value: Any) -> None:
    """File and key are named."""
    told = {
        ("num_attention_heads", "3"): NO_MULTIPLE, ("num_key_value_heads", "3"): NO_MULTIPLE,
        ("head_dim", "7"): "is odd; rotary positions need pairs",
    }.get((key, str(value)), NOT_DONE.get(key, NO_FIT))  # fmt: skip
    change_config(place / "weights", {key: value})
    refused(here(place, "verify", "round-trip", "hf:weights"), told, "weights/config.json", key)


ODD_FAMILIES: list[tuple[str, dict[str, Any], str]] = [
    ("sliding_window", {"model_type": "mistral", "sliding_window": "4096"}, NO_FIT),
    ("sliding_window", {"model_type": "gemma2", "sliding_window": None}, "but sliding_window is null"),
    ("use_sliding_window", {"model_type": "qwen2", "use_sliding_window": "true"}, NO_FIT),
    (
        "max_window_layers",
        {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": -1},
        NO_FIT,
    ),
    ("layer_types", {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, NO_FIT),
    ("layer_types", {"model_type": "gemma2", "layer_types": "full_attention"}, NO_FIT),
    ("layer_types", {"model_type": "gemma2", "layer_types": ["full_attention"]}, NO_FIT),
    ("layer_types", {"model_type": "olmo3", "layer_types": ["full_attention", "chunked_attention"]}, NO_FIT),
    ("sliding_window_pattern", {"model_type": "gemma3_text", "sliding_window_pattern": 0}, NO_FIT),
    ("final_logit_softcapping", {"model_type": "gemma2", "final_logit_softcapping": "30"}, NO_FIT),
    ("query_pre_attn_scalar", {"model_type": "gemma2", "query_pre_attn_scalar": 0}, NO_FIT),
    (
        "rope_parameters",
        {"model_type": "gemma3_text", "rope_parameters": [1]},
        "lacks full_attention.rope_theta",
    ),
    ("rope_parameters", {"model_type": "olmo3", "rope_parameters": "x"}, "lacks full_attention.rope_theta"),
    ("rotary_pct", {"model_type": "gpt_neox", "rotary_pct": 1.5}, NO_FIT),
    (
        "partial_rotary_factor",
        {"model_type": "gpt_neox", "rope_parameters": {"partial_rotary_factor": "half"}},
        NO_FIT,
    ),
    (
        "hidden_size",
        {"model_type": "llama", "hidden_size": 15, "num_attention_heads": 2},
        "is no multiple of the",
    ),
    ("hidden_size", {"model_type": "olmo2", "hidden_size": 4097}, "is no multiple of the"),
    ("n_head", {"model_type": "gpt2", "n_head": 0}, NO_FIT),
    ("n_inner", {"model_type": "gpt2", "n_inner": 0}, NO_FIT),
    ("n_layer", {"model_type": "bloom", "n_layer": 2, "num_hidden_layers": 3}, "mean the same and differ"),
    ("enable_bias", {"model_type": "opt", "enable_bias": 1}, NO_FIT),
]


@pytest.mark.parametrize(("key", "config", "reason"), ODD_FAMILIES, ids=lambda value: str(value)[:40])
def test_a_value_of_another_kind_in_other_families(
    place: Path, here: Here, key: str, config: dict[str, Any], reason: str
) -> None:
    """Keys that a Llama does not have are refused as those above."""
    (place / "weights" / "config.json").write_text(json.dumps(config))
    refused(here(place, "verify", "round-trip", "hf:weights"), reason, "weights/config.json", key)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BAD_ROPES: list[tuple[str, Any, str]] = [
    ("factor", {"rope_type": "linear", "factor": "x"}, NO_FIT),
    ("factor", {"rope_type": "linear", "factor": -2.0}, NO_FIT),
    ("factor", {"rope_type": "linear", "factor": True}, NO_FIT),
    ("factor", {"rope_type": "linear"}, "of type 'linear' lacks factor"),
    ("factor", {"rope_type": "linear", "factor": [2.0]}, NO_FIT),
    ("factor", {"rope_type": "yarn", "factor": "4"}, NO_FIT),
    ("attention_factor", {"rope_type": "yarn", "factor": 4.0, "attention_factor": "much"}, NO_FIT),
    ("beta_fast", {"rope_type": "yarn", "factor": 4.0, "beta_fast": "32"}, NO_FIT),
    (
        "original_max_position_embeddings",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0},
        NO_FIT,
    ),
    ("low_freq_factor", LLAMA3 | {"low_freq_factor": 4.0}, NO_FIT),
    ("high_freq_factor", LLAMA3 | {"high_freq_factor": "4"}, NO_FIT),
    ("rope_type", {"rope_type": "dynamic", "factor": 2.0}, "is not supported; known"),
    ("rope_type", {"rope_type": ["linear"], "factor": 2.0}, "is not supported; known"),
    ("rope_type", {"type": 3}, "is not supported; known"),
    ("rope_theta", {"rope_type": "default", "rope_theta": "x"}, NO_FIT),
    ("rope_theta", {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "yarn needs a number above 1"),
]


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(("key", "rope", "reason"), BAD_ROPES, ids=lambda value: str(value)[:40])
def test_odd_rope_settings(
    place: Path, here: Here, spelling: str, key: str, rope: dict[str, Any], reason: str
) -> None:
    """File and key are named in either spelling."""
    change_config(place / "weights", {"rope_scaling": None, spelling: rope})
    refused(here(place, "verify", "round-trip", "hf:weights"), reason, "weights/config.json", key)


@pytest.mark.parametrize("rope", ["linear", [1], 3])
def test_rope_settings_that_are_no_table(place: Path, here: Here, rope: Any) -> None:
    """A text, a list and a number in place of a table."""
    change_config(place / "weights", {"rope_scaling": rope})
    refused(
        here(place, "verify", "round-trip", "hf:weights"),
        "does not fit: expected a table of rope_type and numbers",
        "weights/config.json",
        "rope_scaling",
    )


@pytest.mark.parametrize(
    ("key", "rope", "reason"),
    [
        ("factor", '{rope_type = "linear", factor = "x"}', NO_FIT),
        ("factor", '{rope_type = "linear"}', "of type 'linear' lacks"),
        ("rope_type", '{rope_type = "dynamic", factor = 2.0}', "is not supported; known"),
        ("low_freq_factor", '{rope_type = "llama3", factor = 2.0}', "of type 'llama3' lacks"),
        ("rope_type", "{rope_type = [1]}", "is not supported; known"),
        ("original_max", '{rope_type="yarn", factor=2.0, original_max_position_embeddings="x"}', NO_FIT),
    ],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["plan", "train"])
def test_odd_rope_settings_of_a_recipe(
    packed: Path, here: Here, verb: str, key: str, rope: str, reason: str
) -> None:
    """The same through `[model]`, before anything is trained."""
    recipe = packed / "tiny.toml"
    recipe.write_text(recipe.read_text().replace("[model]\n", f"[model]\nrope_scaling = {rope}\n"))
    refused(here(packed, verb, "tiny.toml"), reason, "rope_scaling", key)
    assert not (packed / "run" / "train" / "checkpoints").exists()


def test_a_mistral_without_a_window_has_that_of_transformers(tmp_path: Path) -> None:
    """4,096 tokens, and logits beyond it are transformers' own."""
    small = {
        "model_type": "mistral", "vocab_size": 97, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 4200,
        "bos_token_id": None, "eos_token_id": 0,
    }  # fmt: skip
    _, theirs = pair(small, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("sliding_window")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = families.read_hf_config(tmp_path)
    assert model.sliding_window == 4096
    ours = families.build_model(model)
    stored = load_file(tmp_path / "model.safetensors")
    pieces = families.module("mistral", "tables").to_hugging_face(model)
    tokens = torch.randint(0, 97, (1, 4160), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.zero_()[: pieces[name].rows] = stored[pieces[name].name]
        torch.testing.assert_close(
            our_logits(ours, tokens)[:, -40:], theirs(tokens).logits[:, -40:], atol=1e-4, rtol=1e-4
        )


# Indexes and files of tensors

BAD_INDEXES: dict[str, Callable[[dict[str, str]], Any]] = {
    "a list": lambda names: [names],
    "a number": lambda names: 7,
    "no JSON": lambda names: "{",
    "nothing": lambda names: "",
    "empty": lambda names: {},
    "an empty map": lambda names: {"weight_map": {}},
    "a map that is a list": lambda names: {"weight_map": list(names)},
    "a map of null": lambda names: {"weight_map": None},
    "a file of number 3": lambda names: {"weight_map": names | {NORM: 3}},
    "a file of null": lambda names: {"weight_map": names | {NORM: None}},
    "a file of a list": lambda names: {"weight_map": names | {NORM: ["model-0.safetensors"]}},
    "a file above": lambda names: {"weight_map": names | {NORM: "../outside.safetensors"}},
    "a file above, twice": lambda names: {"weight_map": names | {NORM: "x/../../outside.safetensors"}},
    "an absolute file": lambda names: {"weight_map": names | {NORM: "/etc/passwd"}},
    "a file below": lambda names: {"weight_map": names | {NORM: "sub/model.safetensors"}},
    "a file with backslashes": lambda names: {"weight_map": names | {NORM: "..\\outside.safetensors"}},
    "the folder": lambda names: {"weight_map": names | {NORM: "."}},
    "no name": lambda names: {"weight_map": names | {NORM: ""}},
    "a file that is not there": lambda names: {"weight_map": names | {NORM: "model-9.safetensors"}},
    "a tensor that its file lacks": lambda names: {
        "weight_map": names | {"model.layers.9.x": "model-0.safetensors"}
    },
    "a tensor twice": lambda names: (
        json.dumps({"weight_map": names})[:-2] + f', "{NORM}": "model-0.safetensors"}}}}'
    ),
}


# Of all other cases the index is none, or a file's name.
OF_INDEXES = {
    "a file that is not there": "names files that do not exist",
    "a tensor that its file lacks": "lacks model.layers.9.x, which the index says are in it",
    "a tensor twice": f"damaged: it names {NORM} twice",
}


@pytest.mark.parametrize("case", BAD_INDEXES)
def test_an_odd_index(place: Path, here: Here, case: str) -> None:
    """One message with the file; no file of another folder is opened, though it would fit."""
    names = shards(place / "weights")
    save_file({NORM: torch.ones(16)}, place / "outside.safetensors")
    content = BAD_INDEXES[case](names)
    write_index(place / "weights", content)
    is_map = isinstance(content, dict) and NORM in (content.get("weight_map") or {})
    is_map = is_map and isinstance(content["weight_map"], dict)
    told = OF_INDEXES.get(
        case, "which is no name of a file in that folder" if is_map else "not a weight index"
    )
    message = refused(here(place, "verify", "round-trip", "hf:weights"), told, "weights")
    assert ".index.json" in message or "the index says" in message


def test_two_files_with_one_tensor(place: Path, here: Here) -> None:
    """The folder is refused: it does not say which one is meant."""
    shards(place / "weights")
    file = place / "weights" / "model-0.safetensors"
    save_file(load_file(file) | {NORM: torch.zeros(16)}, file)
    other = place / "weights" / "model-1.safetensors"
    save_file(load_file(other) | {NORM: torch.ones(16)}, other)
    refused(
        here(place, "verify", "round-trip", "hf:weights"),
        "Fix: remove the wrong file",
        NORM,
        "model-0.safetensors",
        "model-1.safetensors",
    )


def test_the_links_of_the_hubs_cache_are_followed(place: Path, here: Here) -> None:
    """snapshots/COMMIT/FILE leads to blobs/HASH."""
    shards(place / "weights")
    cache = place / "models--a--b"
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, file in enumerate(sorted((place / "weights").iterdir())):
        file.rename(cache / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    went_well(here(place, "verify", "round-trip", f"hf:{snapshot}"))


def with_header(content: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = change(header)
    text = (text if isinstance(text, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


BAD_HEADERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "empty": ("bytes", lambda c: b""),
    "seven bytes": ("bytes", lambda c: c[:7]),
    "cut in the header": ("cut short", lambda c: c[:40]),
    "cut in the data": ("cut short", lambda c: c[:-1]),
    "a huge header": ("header", lambda c: (2**60).to_bytes(8, "little") + c[8:]),
    "no JSON": ("header", lambda c: c[:8] + b"#" + c[9:]),
    "a list": ("header", lambda c: with_header(c, lambda header: "[]")),
    "a tensor that is a number": (
        "header",
        lambda c: with_header(c, lambda header: header.update({NORM: 3})),
    ),
    "without offsets": (
        "header",
        lambda c: with_header(c, lambda header: header[NORM].pop("data_offsets") and None),
    ),
    "three offsets": (
        "header",
        lambda c: with_header(c, lambda header: header[NORM].update(data_offsets=[0, 1, 2])),
    ),
    "negative offsets": (
        NORM,
        lambda c: with_header(c, lambda header: header[NORM].update(data_offsets=[-64, 0])),
    ),
    "offsets as text": (
        NORM,
        lambda c: with_header(c, lambda header: header[NORM].update(data_offsets=["0", "64"])),
    ),
    "offsets beyond": (
        NORM,
        lambda c: with_header(c, lambda header: header[NORM].update(data_offsets=[10**9, 10**9 + 64])),
    ),
    "overlapping": (
        "overlaps",
        lambda c: with_header(c, lambda header: header[NORM].update(data_offsets=[0, 64])),
    ),
    "unknown dtype": (NORM, lambda c: with_header(c, lambda header: header[NORM].update(dtype="F4"))),
    "a dtype of null": (NORM, lambda c: with_header(c, lambda header: header[NORM].update(dtype=None))),
    "negative shape": (NORM, lambda c: with_header(c, lambda header: header[NORM].update(shape=[-16]))),
    "a shape of true": (NORM, lambda c: with_header(c, lambda header: header[NORM].update(shape=[True, 16]))),
    "a shape as text": (NORM, lambda c: with_header(c, lambda header: header[NORM].update(shape="16"))),
    "a tensor twice": (
        NORM,
        lambda c: with_header(c, lambda h: json.dumps(h)[:-1] + f', "{NORM}": {json.dumps(h[NORM])}' + "}"),
    ),
    "another shape": (NORM, lambda c: with_header(c, lambda header: header[NORM].update(shape=[4, 4]))),
    "whole numbers": (NORM, lambda c: with_header(c, lambda header: header[NORM].update(dtype="I32"))),
}


OF_HEADERS = {
    "empty": "it has 0 bytes, of which the header would be 0",
    "seven bytes": "it has 7 bytes, of which the header",
    "cut in the header": "it has 40 bytes, of which the header",
    "cut in the data": "ends at byte 63832, the file at 63831",
    "a huge header": "of which the header would be 1152921504606846976",
    "no JSON": "its header is damaged",
    "a list": "its header is damaged",
    "a tensor that is a number": "its header is damaged",
    "without offsets": "its header is damaged",
    "three offsets": "its header is damaged",
    "negative offsets": "is at -64 to 0 with the shape",
    "offsets as text": "is at 0 to 64 with the shape",
    "offsets beyond": "the file at 64021",
    "overlapping": "lm_head.weight overlaps",
    "unknown dtype": "is stored as F4; known",
    "a dtype of null": "is stored as None; known",
    "negative shape": "with the shape [-16]",
    "a shape of true": "with the shape [True, 16]",
    "a shape as text": "with the shape ['1', '6']",
    "a tensor twice": "damaged: it names",
    "another shape": "has the shape [4, 4], but",
    "whole numbers": "is stored as I32; known",
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_damaged_file_of_tensors(place: Path, here: Here, case: str) -> None:
    """The file and, where it can be told, the tensor are named."""
    (named, damage), reason = BAD_HEADERS[case], OF_HEADERS[case]
    path = place / "weights" / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    refused(here(place, "verify", "round-trip", "hf:weights"), reason, "model.safetensors", named)


class Trap:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def zipped(content: Any, **options: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path, **options)


def cut(path: Path) -> None:
    torch.save({NORM: torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:-300])


BAD_PICKLES: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: path.touch(),
    "a text": lambda path: path.write_text("weights"),
    "a bare pickle": lambda path: path.write_bytes(pickle.dumps({NORM: [1.0]})),
    "a trap": lambda path: torch.save({NORM: Trap(path.with_name("mark"))}, path),
    "a trap beside tensors": lambda path: torch.save(
        {NORM: torch.ones(16), "x": Trap(path.with_name("mark"))}, path
    ),
    "a bare trap": lambda path: path.write_bytes(pickle.dumps(Trap(path.with_name("mark")))),
    "an old file": zipped({NORM: torch.ones(16)}, _use_new_zipfile_serialization=False),
    "cut short": cut,
    "a list": zipped([torch.ones(16)]),
    "a tensor alone": zipped(torch.ones(16)),
    "nested": zipped({"model": {NORM: torch.ones(16)}}),
    "numbers": zipped({NORM: 3.0}),
    "tensors under numbers": zipped({1: torch.ones(16)}),
    "a sparse tensor": zipped({NORM: torch.ones(16).to_sparse()}),
    "a tensor on meta": zipped({NORM: torch.ones(16, device="meta")}),
    "complex numbers": zipped({NORM: torch.ones(16, dtype=torch.complex64)}),
    "a zip of something else": lambda path: shutil.move(
        shutil.make_archive(str(path), "zip", path.parent), path
    ),
}


# All others are no zip.
OF_PICKLES = {
    "a trap": "it contains more than tensors",
    "a trap beside tensors": "it contains more than tensors",
    "a list": "contains a list and not tensors by name",
    "a tensor alone": "and not tensors by name",
    "nested": "model is a dict; known",
    "numbers": "is a float; known",
    "tensors under numbers": "which is no name of a tensor",
    "a sparse tensor": "in torch.sparse_coo; known",
    "a tensor on meta": "has a shape and no values",
    "complex numbers": "is a torch.complex64",
    "a zip of something else": "cannot be read, cut short or damaged",
}


@pytest.mark.parametrize("case", BAD_PICKLES)
@pytest.mark.filterwarnings("ignore")
def test_a_file_of_pickled_tensors_that_is_none(place: Path, here: Here, case: str) -> None:
    """The file is named and no code of it has run."""
    reason = OF_PICKLES.get(case, "not a zip: cut short, or saved by a torch before 1.6")
    (place / "weights" / "model.safetensors").unlink()
    BAD_PICKLES[case](place / "weights" / "pytorch_model.bin")
    refused(here(place, "verify", "round-trip", "hf:weights"), reason, "pytorch_model.bin")
    assert not (place / "weights" / "mark").exists()


def test_pickled_shards_go_in_and_out(place: Path, here: Here) -> None:
    """The undamaged ones do."""
    shards(place / "weights", torch.save)
    went_well(here(place, "verify", "round-trip", "hf:weights"))


# NaN and infinities

BROKEN: dict[str, tuple[str, torch.dtype, float]] = {
    "NaN in an embedding": (EMBEDDING, torch.float32, float("nan")),
    "NaN in bf16": (DOWN, torch.bfloat16, float("nan")),
    "infinity in fp16": (DOWN, torch.float16, float("inf")),
    "minus infinity in a norm": (NORM, torch.float32, float("-inf")),
    "beyond fp32 in fp64": (DOWN, torch.float64, 1e300),
}


def break_rows(tensor: torch.Tensor, value: float) -> None:
    tensor[1:3] = value


@pytest.mark.parametrize(("name", "dtype", "value"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("verb", ["train", "round-trip"])
def test_weights_that_are_not_finite_do_not_come_in(
    request: pytest.FixtureRequest, here: Here, verb: str, name: str, dtype: torch.dtype, value: float
) -> None:
    """The file, the tensor and how many numbers of it; nothing is trained or saved."""
    workplace = request.getfixturevalue("ready" if verb == "train" else "workplace")
    write_weights(workplace / "weights", dtype)
    change_tensor(workplace / "weights", name, lambda tensor: break_rows(tensor, value))
    counts = {EMBEDDING: "32 of 5,120", DOWN: "64 of 512", NORM: "2 of 16"}
    words = (
        ("train", "tiny.toml", "--set", "model.weights=hf:weights")
        if verb == "train"
        else ("verify", verb, "hf:weights")
    )
    refused(
        here(workplace, *words),
        "numbers that are NaN, infinite or beyond fp32",
        "weights/model.safetensors",
        name,
        counts[name],
    )
    assert not list(workplace.rglob("step_*"))


def load_on_rank(source: Path) -> str:
    from kielo.checkpoint.hugging_face_import import load_model_weights

    model, _ = model_on_ranks(layouts_config(), 1, 2)
    try:
        load_model_weights(dict(model.named_parameters()), source, layouts_config())
    except KieloError as error:
        return str(error)
    return "loaded"


def test_all_ranks_refuse_what_one_has_seen(tmp_path: Path) -> None:
    """A NaN that lies in the shard of one rank is told by both, alike, once."""
    model = layouts_config()
    parameters = dict(families.build_model(model).named_parameters())
    pieces = families.module("llama", "tables").to_hugging_face(model)
    tensors = {
        piece.name: torch.zeros(parameters[ours][: piece.rows].shape) for ours, piece in pieces.items()
    }
    tensors["lm_head.weight"][-1, -1] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    first, second = run_ranks(load_on_rank, 2, tmp_path)
    assert first == second and "lm_head.weight has 1 of" in first


def test_padding_rows_and_large_numbers_are_no_fault(ready: Path, here: Here) -> None:
    """320 tokens are padded to 321 rows here, and the largest numbers of bf16 are numbers."""
    write_weights(ready / "weights", torch.bfloat16)
    change_tensor(ready / "weights", EMBEDDING, lambda tensor: tensor[5].fill_(1e-30))
    here_now = here(
        ready, "train", "tiny.toml", "--set", "model.weights=hf:weights", "--set", "model.vocab_multiple=107"
    )
    went_well(here_now)
    went_well(here(ready, "export", "run", "--to", "out"))
    change_tensor(ready / "weights", DOWN, lambda tensor: tensor[0].fill_(torch.finfo(torch.bfloat16).max))
    went_well(here(ready, "verify", "round-trip", "hf:weights"))


def poisoned(run: Path, to: Path, name: str, value: float) -> Path:
    """A copy of the run's newest checkpoint with `value` in one row of one parameter, as versions before
    could save it: its checksums are right.
    """
    source = newest_checkpoint(run)
    tensors = read_tensors(source, read_index(source).names())
    tensors[f"model/{name}"][0] = value
    checkpointer = Checkpointer(to)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "complaint_unless_finite", lambda copies: None)
        checkpointer.save(20, tensors, read_plain(source))
        checkpoint = checkpointer.settle()
    checkpointer.close()
    return checkpoint


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_weights_that_are_not_finite_do_not_go_out(
    trained: Path, here: Here, value: float, dtype: str
) -> None:
    """The tensor is named in Hugging Face's words, and nothing is published or left half-written."""
    checkpoint = poisoned(trained / "run", trained / "poisoned", "layers.1.mlp.down.weight", value)
    asked = ("export", checkpoint, "--to", "out", "--tokenizer", "run/tokenizer", "--dtype", dtype)
    refused(here(trained, *asked), "NaN or infinite", DOWN, "32 of 512")
    assert not list(trained.glob("out*"))


@pytest.mark.parametrize(
    ("value", "dtype", "works"),
    [
        (70_000.0, "fp16", "--dtype fp32 or bf16"),
        (3.4e38, "bf16", "--dtype fp32"),
        (3.4e38, "fp16", "--dtype fp32"),
    ],
)
def test_a_weight_beyond_the_dtype_does_not_go_out(
    trained: Path, here: Here, value: float, dtype: str, works: str
) -> None:
    """The tensor, its largest number and the dtypes that can hold it."""
    checkpoint = poisoned(trained / "run", trained / "poisoned", "norm.weight", value)
    asked = ("export", checkpoint, "--to", "out", "--tokenizer", "run/tokenizer", "--dtype")
    message = refused(here(trained, *asked, dtype), "has a weight of magnitude", NORM, works)
    assert f"{torch.tensor(value).item():,.0f}" in message and not list(trained.glob("out*"))
    went_well(here(trained, *asked, "fp32"))


def test_an_average_of_a_poisoned_checkpoint_is_refused(trained: Path, here: Here) -> None:
    """The average and the evaluation are both refused."""
    checkpoint = poisoned(trained / "run", trained / "poisoned", "norm.weight", float("nan"))
    sound = newest_checkpoint(trained / "run").with_name("step_00000015")
    refused(
        here(trained, "checkpoint", "average", sound, checkpoint, "--to", "mean"),
        "was not saved in ., earlier ones are untouched",
        "norm.weight",
        "NaN",
    )
    assert not list(trained.glob("mean*"))
    refused(here(trained, "evaluate", checkpoint, "tiny.toml"), "damaged, or overflow", str(checkpoint))


def test_a_run_whose_weights_end_broken_is_not_finished(
    packed: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weight is named, there is no manifest,
    and the same command goes on from the last sound checkpoint.
    """
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "fit", fit_and_break)
        refused(here(packed, "train", "tiny.toml"), "The run is not finished", "layers.0.attention.q.weight")
    assert not (packed / "run" / "train" / "manifest.json").exists()
    went_well(here(packed, "train", "tiny.toml"))
    assert (packed / "run" / "train" / "manifest.json").exists()


def fit_and_break(run: Any, phase: Any) -> bool:
    from kielo.train.loop import fit

    is_stopped = fit(run, phase)
    run.checkpoints.settle()
    with torch.no_grad():
        dict(run.current.model.named_parameters())["layers.0.attention.q.weight"].mul_(torch.nan)
    return is_stopped


def test_a_run_whose_heldout_loss_ends_broken_is_not_finished(
    packed: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit_badly(run: Any, phase: Any) -> bool:
        from kielo.train.loop import fit

        run.current.heldout.loss_at = lambda state: float("nan")
        return fit(run, phase)

    monkeypatch.setattr(run_module, "fit", fit_badly)
    refused(
        here(packed, "train", "tiny.toml"), "The run is not finished", "step 20, the last", "held-out loss"
    )
    assert not (packed / "run" / "train" / "manifest.json").exists()


def look_at_the_end() -> str:
    model, _ = model_on_ranks(layouts_config(), 1, 2)
    torch.nn.init.ones_(dict(model.named_parameters())["norm.weight"])
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    refuse_unsound_weights(model, torch.device("cpu"))
    if int(os.environ["RANK"]) == 1:
        with torch.no_grad():
            dict(model.named_parameters())["layers.1.mlp.up.weight"].to_local()[-1, -1] = torch.inf
    try:
        refuse_unsound_weights(model, torch.device("cpu"))
    except KieloError as error:
        return str(error)
    return "sound"


def test_ranks_agree_on_what_is_broken() -> None:
    """An infinity in the shard of one of two ranks."""
    first, second = run_ranks(look_at_the_end, 2)
    assert first == second and "layers.1.mlp.up.weight." in first


# Tokenizers' names of their tokens, and folders that `evaluate` and `export` are given

ODD_TOKENS: dict[str, Any] = {
    "a list": ["<|endoftext|>"], "a number": 3, "true": True, "a table without content": {"id": 0},
    "a table of a number": {"content": 0},
}  # fmt: skip


@pytest.mark.parametrize("value", ODD_TOKENS.values(), ids=ODD_TOKENS)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_an_odd_end_of_text_is_named(trained: Path, here: Here, file: str, value: Any) -> None:
    """Either file is named, on the way out and, where it is read, in training."""
    path = trained / "run" / "tokenizer" / file
    path.write_text(
        json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | {"eos_token": value})
    )
    refused(
        here(trained, "export", "run", "--to", "out"),
        "does not fit. Fix: the text of a token",
        file,
        "eos_token",
    )
    assert not list(trained.glob("out*"))
    if file == "tokenizer_config.json":
        refused(
            here(trained, "train", "tiny.toml"),
            "does not fit. Fix: the text of a token",
            file,
            "eos_token",
        )


@pytest.mark.parametrize("value", [None, "", "<|endoftext|>", {"content": "<|endoftext|>"}], ids=str)
def test_an_end_of_text_in_any_spelling(trained: Path, here: Here, value: Any) -> None:
    """Null and nothing mean the usual one."""
    path = trained / "run" / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": value}))
    (trained / "run" / "tokenizer" / "special_tokens_map.json").unlink(missing_ok=True)
    went_well(here(trained, "export", "run", "--to", "out"))
    assert json.loads((trained / "out" / "config.json").read_text())["eos_token_id"] == (0 if value else None)


@pytest.mark.parametrize("content", ["[]", "3", "{", "null"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"])
def test_an_odd_tokenizer_file_does_not_go_out(trained: Path, here: Here, file: str, content: str) -> None:
    """The file is refused, also in a folder that is sent round."""
    (trained / "run" / "tokenizer" / file).write_text(content)
    told, named = "not a JSON object", file
    if file == "tokenizer.json":
        told, named = "is not the tokenizer that made the checkpoint's tokens", "tokenizer"
    refused(here(trained, "export", "run", "--to", "out"), told, named)
    write_weights(trained / "weights")
    for found in (trained / "run" / "tokenizer").glob("*.json"):
        if found.name != "manifest.json":
            shutil.copy(found, trained / "weights")
    told = "not a readable tokenizer" if file == "tokenizer.json" else told
    refused(here(trained, "verify", "round-trip", "hf:weights"), told, file)


def spoil(file: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / file).write_bytes(content)


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(DOWN)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def truncated_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({NORM: torch.ones(16)}, folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes()[:-200])


def trapped_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({NORM: Trap(folder / "mark")}, folder / "pytorch_model.bin")


SPOILED: dict[str, Callable[[Path], Any]] = {
    "a config that is a list": spoil("config.json", b"[]"),
    "a config with text for numbers": lambda folder: change_config(folder, {"hidden_size": "16"}),
    "nought heads": lambda folder: change_config(folder, {"num_attention_heads": 0}),
    "an unknown model": lambda folder: change_config(folder, {"model_type": "nothing"}),
    "a factor of x": lambda folder: change_config(
        folder, {"rope_scaling": {"rope_type": "linear", "factor": "x"}}
    ),
    "generation settings that are a list": spoil("generation_config.json", b"[1]"),
    "a tensor that is missing": drop_tensor,
    "a damaged file": spoil("model.safetensors", b"\\x10" * 100),
    "a pickle cut short": truncated_pickle,
    "a pickle with a trap": trapped_pickle,
    "another vocabulary": lambda folder: write_weights_of_vocabulary(folder, 100),
    "NaN": lambda folder: change_tensor_for_torch(folder, NORM, torch.nan),
}


def write_weights_of_vocabulary(folder: Path, size: int) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensors[name][:size].clone() for name in (EMBEDDING, "lm_head.weight")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, {"vocab_size": size})


def change_tensor_for_torch(folder: Path, name: str, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name].fill_(value)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# All others are what transformers cannot load.
OF_SPOILED = {
    "a tensor that is missing": "tensors of the model are missing",
    "another vocabulary": "they do not belong together",
    "NaN": "its weights are damaged, or overflow",
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_folder_is_not_evaluated(trained: Path, here: Here, case: str) -> None:
    """The folder is named; no random numbers stand in for what is missing, and no code of it runs."""
    went_well(here(trained, "export", "run", "--to", "model", "--dtype", "fp32"))
    tensors = load_file(trained / "model" / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors[EMBEDDING].clone())
    save_file(tensors, trained / "model" / "model.safetensors", {"format": "pt"})
    change_config(trained / "model", {"tie_word_embeddings": False})
    SPOILED[case](trained / "model")
    reason = OF_SPOILED.get(case, "not a causal language model that transformers can load")
    refused(here(trained, "evaluate", "model", "tiny.toml"), reason, "model")
    assert not (trained / "model" / "mark").exists()


# The hub


def stand_in_hub(folder: Path) -> None:
    """Two nodes of two ranks, each with an empty cache;
    every download leaves a line in `folder`/downloads.
    """
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(rank % 2)
    snapshot = folder / f"node {rank // 2}" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"

    def fetch(
        name: str, revision: str | None = None, local_files_only: bool = False, **patterns: object
    ) -> str:
        if not local_files_only and "*.safetensors" in patterns["allow_patterns"]:
            with open(folder / "downloads", "a") as file:
                file.write(f"node {rank // 2}\n")
            shutil.copytree(folder / "weights", snapshot, dirs_exist_ok=True)
        elif local_files_only and not snapshot.is_dir():
            raise LocalEntryNotFoundError("not cached")
        return str(snapshot)

    huggingface_hub.snapshot_download = fetch


def train_on_rank(workplace: Path) -> str:
    stand_in_hub(workplace)
    os.chdir(workplace)
    sets = ["model.weights=hf:org/model", "train.tokens=256"]
    return train_here(read_recipe("tiny.toml", sets).recipe).outcome


def test_one_rank_of_each_node_asks_the_hub(ready: Path) -> None:
    """Four ranks on two nodes: two downloads, and the run trains."""
    write_weights(ready / "weights")
    assert run_ranks(train_on_rank, 4, ready) == ["finished"] * 4
    assert sorted((ready / "downloads").read_text().split("\n")) == ["", "node 0", "node 1"]


def test_as_a_person_types_it(place: Path) -> None:
    """A process of its own: one message, exit code 1."""
    change_config(place / "weights", {"num_attention_heads": 0})
    refused(
        kielo(place, "verify", "round-trip", "hf:weights"),
        "does not fit: expected a whole number from 1",
        "weights/config.json",
        "num_attention_heads",
    )
