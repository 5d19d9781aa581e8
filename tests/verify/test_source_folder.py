"""The certificate begins with the folder of the weights: what Kielo reads otherwise than transformers."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kielo.artifact.verify_results import SourceFolder
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.models import families
from kielo.models.piece import Piece
from kielo.recipe.sections import Model
from kielo.verify import source_folder
from kielo.verify.certificate import verdict
from kielo.verify.parity import ParityOptions, verify_parity
from kielo.verify.source_folder import compare_source
from tests.models.equality import pair
from tests.models.tiny_configs import TINY
from tests.train.tiny_run import resolve, write_tokens

LAYERS = 4
DECODERS = [variant for variant in TINY if not variant.startswith("modernbert")]
GEMMA3 = "gemma3_text"


def saved(variant: str, folder: Path, **changes: Any) -> Model:
    """Save transformers' model of that variant with random weights; return what Kielo reads of its config."""
    return pair(copy.deepcopy(TINY[variant]) | changes, folder)[0].config


def compared(folder: Path, model: Model, **changes: Any) -> SourceFolder:
    return compare_source(folder, model.model_copy(update=changes), 24)


@pytest.mark.parametrize("variant", DECODERS)
def test_what_is_imported_right_passes(variant: str, tmp_path: Path) -> None:
    """All layers are compared, with tokens of the whole vocabulary."""
    found = compared(tmp_path, saved(variant, tmp_path))
    assert found.passed and found.logits_max_difference <= 1e-4, found.in_words()
    assert found.layers == found.layers_of_model == 2 and found.layer is None
    assert "are equal: logits by at most" in found.in_words()


@pytest.mark.parametrize(
    ("variant", "wrong", "named"),
    [
        ("llama", {"rms_norm_eps": 1e-5}, "norm epsilon"),
        ("llama", {"rope_theta": 9_000.0}, "RoPE base"),
        ("llama", {"tie_word_embeddings": True}, "head tied"),
        ("llama, llama3 rope, tied", {"rope_scaling": None}, "RoPE inverse frequencies"),
        ("mistral", {"sliding_window": None}, "window of each layer"),
        ("mistral", {"sliding_window": 8}, "window of each layer"),
        ("qwen2", {"layer_types": ("sliding_attention", "full_attention")}, "window of each layer"),
        ("gemma2", {"attn_logit_softcapping": None}, "layers.0.attention"),
        ("gemma2", {"final_logit_softcapping": None}, "the head's output is not"),
        ("gemma2", {"query_pre_attn_scalar": 16.0}, "layers.0.attention"),
        (GEMMA3, {"rope_local_base_freq": 1e4}, "RoPE base"),
        ("gpt2", {"layer_norm_epsilon": 1e-2}, "norm epsilon"),
        ("gpt2", {"hidden_act": "relu"}, "layers.0.mlp"),
        ("gpt_neox", {"use_parallel_residual": False}, "layers.0 (after"),
        ("bloom", {"layer_norm_epsilon": 1e-2}, "norm epsilon"),
    ],
)
def test_a_key_that_is_read_wrongly_is_named(
    variant: str, wrong: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """Windows that are longer than the sequence, too: settings are compared beside the logits."""
    model = saved(variant, tmp_path)
    if wrong.get("tie_word_embeddings"):
        stored = load_file(tmp_path / "model.safetensors")
        save_file(stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()},
                  tmp_path / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    found = compared(tmp_path, model, **wrong)
    assert not found.passed
    assert named in found.in_words().partition("DIFFER")[2]


@pytest.mark.parametrize("window", [7, 4096])
def test_a_window_beyond_the_sequence(window: int, tmp_path: Path) -> None:
    """It changes no logit of 24 tokens, and is named all the same."""
    model = saved("mistral", tmp_path, sliding_window=window)
    assert compared(tmp_path, model).passed
    found = compared(tmp_path, model, sliding_window=5000)
    assert not found.passed and found.settings.differing == ["window of each layer"]


def swapped(pieces: dict[str, Piece]) -> dict[str, Piece]:
    gate, up = (f"layers.1.mlp.{name}.weight" for name in ("gate", "up"))
    return pieces | {gate: pieces[up], up: pieces[gate]}


def test_a_tensor_in_another_one_s_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that Kielo has wrong: the layer is named."""
    model, names = saved("llama", tmp_path), families.module("llama", "tables")
    right: Callable[[Model], dict[str, Piece]] = names.to_hugging_face
    monkeypatch.setattr(names, "to_hugging_face", lambda config: swapped(right(config)))
    found = compared(tmp_path, model)
    assert not found.passed and found.layer.startswith("layers.1.mlp")


@pytest.mark.parametrize("variant", ["llama", GEMMA3, "gpt2", "bloom", "olmo3", "gpt_neox", "mistral"])
def test_a_model_too_large_is_compared_with_two_layers(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both kinds if there are two; a key that is read wrongly, and windows of later layers, show."""
    kinds = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]
    layers: dict[str, Any] = {"n_layer" if variant == "gpt2" else "num_hidden_layers": LAYERS}
    if "layer_types" in TINY[variant]:
        layers["layer_types"] = kinds
    model = saved(variant, tmp_path, **layers)
    assert compared(tmp_path, model).layers == LAYERS
    monkeypatch.setattr(source_folder, "WHOLE_MODEL_BYTES", 1000)
    found = compared(tmp_path, model)
    assert found.passed, found.in_words()
    assert (found.layers, found.layers_of_model) == (2, LAYERS)
    assert f"with 2 of {LAYERS} layers" in found.in_words()
    key = "layer_norm_epsilon" if variant in ("gpt2", "bloom", "gpt_neox") else "rms_norm_eps"
    assert compared(tmp_path, model, **{key: 1e-2}).layer.startswith(("layers.0", "embed_norm"))
    if "layer_types" in layers:
        later = compared(tmp_path, model, layer_types=(*kinds[:2], "full_attention", "full_attention"))
        assert later.settings.differing == ["window of each layer"]


def test_a_transplanted_vocabulary_is_compared_with_its_own(tmp_path: Path) -> None:
    """The run's vocabulary is in no file: the folder's own is compared."""
    model = saved("llama", tmp_path)
    found = compared(tmp_path, model, vocab_size=300, transplant="mean")
    assert "with their own vocabulary are equal" in found.in_words()
    assert not compared(tmp_path, model, vocab_size=300, transplant="mean", rms_norm_eps=1e-2).passed


def certificate(tmp_path: Path, **wrong: Any):
    """Certify a checkpoint of Kielo's own, of a run whose model came from a folder."""
    model = saved("llama", tmp_path / "hf").model_copy(update={"weights": f"hf:{tmp_path / 'hf'}"} | wrong)
    write_tokens(tmp_path / "tokens")
    resolved = resolve(tmp_path)
    resolved = resolved.model_copy(update={"identity": resolved.identity.model_copy(update={"model": model})})
    initial = families.module("llama", "model").initial_value
    built = families.build_model(model)
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    weights = {f"model/{name}": initial(name, p.shape, model, 1) for name, p in built.named_parameters()}
    checkpointer.save(5, weights, {})
    options = ParityOptions(steps=2, sequence_length=16)
    return verify_parity(resolved, tmp_path / "verify", checkpointer.settle(), options)


def test_a_run_whose_model_was_read_wrongly_is_not_certified(tmp_path: Path) -> None:
    """Both sides of the steps share the error, so that their losses are equal; the folder shows it."""
    found = certificate(tmp_path, rms_norm_eps=1e-2)
    assert found.losses.relative_differences[0] < 1e-5 and found.settings.differing == []
    assert not found.passed and not found.source.passed
    assert found.first_difference.layer == "layers.0.attention_norm"
    assert verdict(found).startswith("Before any step, Kielo's import of the weights and")


def test_a_run_whose_model_was_read_right_is_certified(tmp_path: Path) -> None:
    """The figure of the source folder is what transformers and Kielo's first weights give."""
    found = certificate(tmp_path)
    assert found.passed and found.source.passed and found.first_difference is None
    assert found.source.folder == str(tmp_path / "hf") and "are equal" in verdict(found)
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", config=config, dtype=torch.float32)
    assert found.source.layers == theirs.config.num_hidden_layers
