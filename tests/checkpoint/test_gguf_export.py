"""GGUF files of every family beside transformers: llama.cpp's own scores, and the gguf package's reader."""

import errno
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F

from kielo.checkpoint import llama_cpp
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.export_stage import ExportOptions, wanted_export
from kielo.checkpoint.gguf_export import export_gguf
from kielo.checkpoint.gguf_vocabulary import split_name
from kielo.recipe.errors import KieloError
from kielo.tokenizer.spelling import pre_tokenizer
from tests.models.equality import pair
from tests.models.tiny_configs import TINY

ROWS, LENGTH = 320, 24
needs_llama_cpp = pytest.mark.skipif(llama_cpp.program() is None, reason="pip install cyllama")


def _layers(number: int, full_every: int) -> list[str]:
    return [("full" if at % full_every == 0 else "sliding") + "_attention" for at in range(1, number + 1)]


_GEMMA_SCALE = {"query_pre_attn_scalar": 16}
# Tiny models as llama.cpp has them, with the keys that it computes otherwise changed.
MODELS = {
    "llama": {},
    "llama, llama3 rope, tied": {},
    "llama, linear rope, biases, wide heads": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "olmo2": {},
    "olmo2, tied": {"tie_word_embeddings": True},
    "olmo3": {"rope_scaling": None, "num_hidden_layers": 5, "layer_types": _layers(5, 4)},
    "olmo3, another base, no window": {},
    "gemma2": _GEMMA_SCALE,
    "gemma3_text": _GEMMA_SCALE | {"num_hidden_layers": 7, "layer_types": _layers(7, 6)},
    "gemma3_text, capped logits, no window, untied": {"query_pre_attn_scalar": 8},
    "gpt2": {},
    "gpt2, untied, narrow": {"activation_function": "gelu_new", "n_inner": 48, "tie_word_embeddings": False},
    "gpt_neox": {"hidden_act": "gelu_fast"},
    "gpt_neox, in sequence": {"hidden_act": "gelu_fast", "use_parallel_residual": False, "rotary_pct": 0.25},
    "bloom": {},
    "bloom, six heads, untied": {},
}
SILU = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3")
# llama.cpp computes these otherwise, or does not have them.
REFUSED = {
    "mistral": "sliding_window = 7",
    "qwen2": "sliding_window = 7",
    "olmo3": "this order of layer_types",
    "gemma2": "query_pre_attn_scalar = 24",
    "gpt_neox": "hidden_act = gelu",
    "olmo2, yarn rope, biases, wide heads, tied": "attention_bias = true",
    "gemma2, no caps, linear rope, biases, untied": "attention_bias = true",
    "gpt2, untied, exact gelu, narrow": "hidden_act = gelu",
    "opt": "no decoder opt",
    "opt, no biases, untied, gelu": "no decoder opt",
    "gpt_neox, in sequence, tied, no biases, linear rope, tanh gelu": "attention_bias = false",
    "modernbert": "no decoder modernbert",
    "modernbert, biases, another order of layers, tanh gelu": "no decoder modernbert",
    "gemma2, logits without a cap": "no final_logit_softcapping",
    "gemma2, no window, long": "max_position_embeddings = 4097",
    "qwen3, llama3 rope": "rope_scaling of type llama3",
    "qwen2, wide heads": "head_dim = 16",
}
CHANGED = {
    "gemma2, logits without a cap": _GEMMA_SCALE | {"final_logit_softcapping": None},
    "gemma2, no window, long": _GEMMA_SCALE
    | {"max_position_embeddings": 4097, "layer_types": ["full_attention"] * 2},
    "qwen3, llama3 rope": {"rope_scaling": TINY["llama, llama3 rope, tied"]["rope_scaling"]},
    "qwen2, wide heads": {"use_sliding_window": False, "head_dim": 16},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A byte-level BPE of 300 tokens with Kielo's split of words, by the tokenizers library."""
    return trained(tmp_path_factory.mktemp("tokenizer"), pre_tokenizer())


def trained(folder: Path, split: pre_tokenizers.PreTokenizer) -> Path:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = split, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    made.train_from_iterator(["Tere, maailm! Tere hommikust, Eesti 12345."] * 20, trainer)
    made.add_tokens([AddedToken("<nimi>", normalized=False)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def configured(name: str) -> dict[str, Any]:
    return TINY.get(name, TINY[name.split(",", maxsplit=1)[0]]) | MODELS[name]


def exported(
    config: dict[str, Any], tokenizer: Path, folder: Path, dtype: str = "fp32", largest: float = 0.0
):
    """(GGUF file, transformers' model) of a tiny model with random weights, and one of size `largest`."""
    ours, theirs = pair(config | {"vocab_size": ROWS}, folder / "theirs")
    if largest:
        ours.state_dict()["layers.1.mlp.gate.weight"][3, 5] = -largest
    checkpointer = Checkpointer(folder / "checkpoints")
    checkpointer.save(1, {f"model/{key}": value for key, value in ours.state_dict().items()}, {})
    checkpoint = checkpointer.settle()
    options = ExportOptions(dtype, is_gguf=True, about={"name": "tiny", "languages": ["et"]})
    wanted = wanted_export(checkpoint, folder / "out", ours.config, tokenizer, options)
    export_gguf(wanted)
    (file,) = (folder / "out").glob("*.gguf")
    return file, theirs


# Variants of a family that llama.cpp computes by the family's own graph are in make test-full.
RARELY = (
    "olmo2, tied", "olmo3, another base, no window", "gpt2, untied, narrow", "bloom, six heads, untied",
    "mistral", "gpt_neox, in sequence", "gemma3_text, capped logits, no window, untied",
)  # fmt: skip


@needs_llama_cpp
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in RARELY)) for name in MODELS]
)
def test_llama_cpp_gives_the_scores_of_transformers(name, tokenizer, tmp_path) -> None:
    """A wrong order of heads, a bias or a norm left out is 0.05 and more."""
    file, theirs = exported(configured(name), tokenizer, tmp_path)
    ids = torch.randint(0, ROWS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = theirs(ids).logits.double()
    right = F.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    # llama.cpp computes GELU by a table in fp16, whose rounding grows over seven layers.
    tolerance = 2e-4 if theirs.config.model_type in SILU else 2e-2
    found, greedy = llama_cpp.scores_of(file, ids.tolist(), 6)
    assert torch.allclose(torch.tensor(found, dtype=right.dtype), right, rtol=0, atol=tolerance), (
        (torch.tensor(found) - right).abs().max()
    )
    for one, way_on in zip(ids, greedy, strict=True):
        (whole,) = theirs.generate(one[None], max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert way_on == whole[LENGTH:].tolist()


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(name, tokenizer, tmp_path) -> None:
    config = TINY.get(name, TINY[name.split(",", maxsplit=1)[0]]) | CHANGED.get(name, {})
    with pytest.raises(KieloError, match=f"^--format gguf: llama.cpp.*{REFUSED[name]}"):
        exported(config, tokenizer, tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "dtype"), [("llama", "fp32"), ("qwen3", "q8_0"), ("gemma3_text", "q8_0")])
def test_blocks_of_rows_give_the_same_file(name, dtype, tokenizer, tmp_path, monkeypatch) -> None:
    config = configured(name) | {"hidden_size": 64, "intermediate_size": 96}
    whole, _ = exported(config, tokenizer, tmp_path / "whole", dtype)
    monkeypatch.setattr("kielo.checkpoint.export_tensors.BLOCK_BYTES", 2_000)
    blocks, _ = exported(config, tokenizer, tmp_path / "blocks", dtype)
    assert blocks.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(("dtype", "largest"), [("fp16", 65_519), ("q8_0", 65_519 * 127)])
def test_a_weight_that_would_become_infinite_is_refused(dtype, largest, tokenizer, tmp_path) -> None:
    """The largest that fp16, or an fp16 scale of 127 steps, still rounds to a number is written."""
    config = configured("llama") | {"hidden_size": 64, "intermediate_size": 96}
    file, _ = exported(config, tokenizer, tmp_path / "fits", dtype, largest)
    (tensor,) = (one for one in gguf.GGUFReader(file).tensors if one.name == "blk.1.ffn_gate.weight")
    found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert np.isfinite(found).all() and found[3, 5] == pytest.approx(-largest, rel=1e-3)
    with pytest.raises(KieloError, match=r"gate.weight has a weight of .* Fix: --dtype bf16"):
        exported(config, tokenizer, tmp_path / "too_large", dtype, largest * 1.001)
    assert not list((tmp_path / "too_large").glob("*out*"))


def test_the_file_has_the_weights_and_the_vocabulary(tokenizer, tmp_path) -> None:
    """By the gguf package's reader: matrices as asked, norms in fp32, tokens in the order of ids."""
    config = configured("llama") | {"hidden_size": 64, "intermediate_size": 96}
    files = {}
    for dtype, kind in (("fp32", "F32"), ("fp16", "F16"), ("bf16", "BF16"), ("q8_0", "Q8_0")):
        file, theirs = exported(config, tokenizer, tmp_path / dtype, dtype)
        assert file.name == f"out.{kind}.gguf"
        files[kind] = reader = gguf.GGUFReader(file)
        read = {one.name: one for one in reader.tensors}
        right = theirs.state_dict()
        gate, norm = read["blk.1.ffn_gate.weight"], read["blk.0.attn_norm.weight"]
        assert (gate.tensor_type.name, norm.tensor_type.name) == (kind, "F32")
        found = gguf.quants.dequantize(gate.data, gate.tensor_type)
        whole = right["model.layers.1.mlp.gate_proj.weight"].numpy()
        # Half a unit of the last place of a number below 1; a 127th of a block's largest.
        error = {"F32": 0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": np.abs(whole).max() / 254 * 1.01}[kind]
        assert found.shape == whole.shape and np.abs(found - whole).max() <= error
        assert np.array_equal(norm.data, right["model.layers.0.input_layernorm.weight"].numpy())
    fields = files["F32"].fields
    stored = json.loads((tokenizer / "tokenizer.json").read_text())
    vocabulary = stored["model"]["vocab"] | {one["content"]: one["id"] for one in stored["added_tokens"]}
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert {token: number for number, token in enumerate(tokens) if token in vocabulary} == vocabulary
    assert tokens[len(vocabulary) :] == [f"[PAD{number}]" for number in range(len(vocabulary), ROWS)]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    normal, control, own, unused = 1, 3, 4, 5
    assert kinds == [control, *[normal] * (len(vocabulary) - 2), own, *[unused] * (ROWS - len(vocabulary))]
    assert fields["tokenizer.ggml.merges"].contents() == [" ".join(one) for one in stored["model"]["merges"]]
    assert fields["tokenizer.ggml.pre"].contents() == "qwen35"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 0
    assert fields["general.languages"].contents() == ["et"]
    model_file = (tmp_path / "fp32" / "out" / "Modelfile").read_text()
    assert "FROM ./out.F32.gguf\n" in model_file and 'PARAMETER stop "<|endoftext|>"\n' in model_file


# As in the tokenizer.json of Llama 3, Qwen 2.5, GPT-2, BLOOM and Mistral NeMo.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_NEMO = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _content(pattern: str | None, use_regex: bool = False, **model: Any) -> dict[str, Any]:
    last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex or pattern is None}
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    split = last if pattern is None else {"type": "Sequence", "pretokenizers": [cut, last]}
    return {"normalizer": None, "pre_tokenizer": split, "model": {"type": "BPE"} | model}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("llama-bpe", _content(_LLAMA3, ignore_merges=True)),
        ("smaug-bpe", _content(_LLAMA3)),
        ("qwen2", _content(_LLAMA3.replace("{1,3}", ""))),
        ("gpt-2", _content(None)),
        ("bloom", _content(r" ?[^(\s|[.,!?…。，、।۔،])]+")),
        ("tekken", _content(_NEMO, ignore_merges=True)),
    ],
)
def test_published_splits_have_llama_cpp_s_names(name, content) -> None:
    assert split_name(content, Path("tokenizer.json")) == name


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (_content(_LLAMA3.replace("{1,3}", "{1,2}")), "has no name for its split of words"),
        (
            _content(None) | {"normalizer": {"type": "NFC"}},
            "has a normalizer, which llama.cpp does not apply",
        ),
        (_content(_LLAMA3, use_regex=True), "has no name for its split of words"),
        (_content(None, byte_fallback=True), "not byte-level BPE"),
        (_content(None) | {"model": {"type": "Unigram"}}, "a Unigram vocabulary"),
    ],
)
def test_other_tokenizers_are_refused(content, reason) -> None:
    with pytest.raises(KieloError, match=reason):
        split_name(content, Path("tokenizer.json"))


@needs_llama_cpp
def test_other_ids_refuse_the_export(tmp_path, monkeypatch) -> None:
    """A file with the name of Qwen's split, which cuts numbers into digits, is not written."""
    tokenizer = trained(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False))
    monkeypatch.setattr("kielo.checkpoint.gguf_vocabulary.split_name", lambda *_: "qwen2")
    with pytest.raises(KieloError, match=r"llama.cpp gives other ids than the model is trained on: '"):
        exported(configured("llama"), tokenizer, tmp_path)
    assert not list(tmp_path.glob("*out*"))
    # Written without llama.cpp, and compared once it is there.
    monkeypatch.setattr("kielo.checkpoint.llama_cpp.program", lambda: None)
    exported(configured("llama"), tokenizer, tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr("kielo.checkpoint.gguf_vocabulary.split_name", lambda *_: "qwen2")
    with pytest.raises(KieloError, match=r"llama.cpp gives other ids than the model is trained on: '"):
        export_gguf(_same(tokenizer, tmp_path))


def _same(tokenizer: Path, folder: Path, **about: Any):
    (checkpoint,) = (folder / "checkpoints").glob("step_*")
    model = pair(configured("llama") | {"vocab_size": ROWS}, folder / "theirs again")[0].config
    options = ExportOptions("fp32", is_gguf=True, about={"name": "tiny", "languages": ["et"]} | about)
    return wanted_export(checkpoint, folder / "out", model, tokenizer, options)


@needs_llama_cpp
def test_a_file_written_without_llama_cpp_is_compared_later(tokenizer, tmp_path, monkeypatch) -> None:
    on_disk: list[Path] = []
    monkeypatch.setattr("kielo.checkpoint.gguf_export.bring_to_disk", on_disk.append)
    monkeypatch.setattr("kielo.checkpoint.llama_cpp.program", lambda: None)
    file, _ = exported(configured("llama"), tokenizer, tmp_path)
    assert [path.name for path in on_disk] == [file.name]
    before = file.stat().st_mtime_ns
    assert json.loads((file.parent / "gguf.json").read_text())["ids"]["documents"] == 0
    monkeypatch.undo()
    assert export_gguf(_same(tokenizer, tmp_path)).documents > 5
    proof = json.loads((file.parent / "gguf.json").read_text())["ids"]
    assert proof["documents"] > 5 and proof["program"].startswith("cyllama")
    assert file.stat().st_mtime_ns == before
    assert export_gguf(_same(tokenizer, tmp_path)) is None
    assert not _same(tokenizer, tmp_path, license="mit").stage.is_done()


def test_a_failed_write_leaves_no_part_of_the_file(tokenizer, tmp_path, monkeypatch) -> None:
    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(KieloError, match="disk full"):
        exported(configured("llama"), tokenizer, tmp_path)
    assert not list(tmp_path.rglob("*.gguf"))


@needs_llama_cpp
def test_a_file_that_llama_cpp_cannot_read(tmp_path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(KieloError, match="a.gguf: llama.cpp .* failed with exit code"):
        llama_cpp.ids_of(tmp_path / "a.gguf", ["a"])
