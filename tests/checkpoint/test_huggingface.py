"""Weights come in by slices on any layout and go out as a folder that transformers loads, unchanged."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kielo.artifact.manifest import read_manifest
from kielo.checkpoint.huggingface import export, is_exported, load_weights, resolve_weights
from kielo.checkpoint.store import Store
from kielo.models.families import read_hf_config
from kielo.models.llama.model import Llama
from kielo.models.llama.names import to_hugging_face
from kielo.recipe.errors import KieloError
from tests.checkpoint.layouts import config, model_on_ranks, values
from tests.ranks import run_ranks


def plain_model(model_config, seed: int) -> Llama:
    model = Llama(model_config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values(model_config, seed)(name, parameter.shape) * (1 if "norm" in name else 5))
    return model


def saved(folder: Path, model: Llama) -> Path:
    return Store(folder).save(3, {f"model/{name}": value for name, value in model.state_dict().items()}, {})


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = ["<|endoftext|>", *sorted(ByteLevel.alphabet())[:60]]
    tokenizer = Tokenizer(BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>")
    (folder / "special_tokens_map.json").write_text(json.dumps(roles))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(roles | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_an_export_is_the_same_model_in_transformers(tmp_path, tokenizer_folder, tied):
    """Logits within 1e-4 in fp32, generation works, and every file is the one that the manifest names."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = plain_model(config(tied), seed=5)
    checkpoint = saved(tmp_path / "checkpoints", model)
    arguments = (checkpoint, tmp_path / "hf", config(tied), tokenizer_folder)
    options = {"max_shard_bytes": 9000, "generation": {"do_sample": True, "top_k": 50}}
    folder = export(*arguments, **options)
    assert is_exported(*arguments, **options) and not is_exported(*arguments)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2 and all((folder / shard).stat().st_size < 10_000 for shard in shards)
    digests = read_manifest(folder).counts["sha256"]
    assert set(digests) | {"manifest.json"} == {path.name for path in folder.iterdir()}
    for name, digest in digests.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest

    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert theirs.dtype == torch.float32 and theirs.generation_config.top_k == 50
    tokens = torch.randint(0, 67, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (model.head(model(tokens)) - theirs(tokens).logits).abs().max()
        generated = theirs.generate(tokens[:, :4], max_new_tokens=5, do_sample=False)
    assert difference <= 1e-4 and generated.shape[1] > 4
    assert theirs.generation_config.eos_token_id == 0
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|endoftext|>"


def test_the_dtype_is_as_asked_and_nothing_half_written_stays(tmp_path, tokenizer_folder):
    """bf16 in one file; an unknown dtype or a checkpoint without the tensors leaves no folder."""
    model = plain_model(config(), seed=5)
    checkpoint = saved(tmp_path / "checkpoints", model)
    folder = export(checkpoint, tmp_path / "hf", config(), tokenizer_folder, dtype="bf16")
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], model.head.weight.detach().bfloat16())
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(KieloError, match="fp8.*fp32, bf16"):
        export(checkpoint, tmp_path / "other", config(), tokenizer_folder, dtype="fp8")
    bigger = config().model_copy(update={"num_hidden_layers": 3})
    with pytest.raises(KieloError, match=r"layers\.2\.attention_norm\.weight"):
        export(checkpoint, tmp_path / "other", bigger, tokenizer_folder)
    assert not list(tmp_path.glob("other*"))


def import_on_ranks(source: Path, to: Path, replicate: int, shard: int, tensor: int) -> None:
    model_config = read_hf_config(source)
    model, _ = model_on_ranks(model_config, replicate, shard, tensor=tensor)
    load_weights(dict(model.named_parameters()), source, to_hugging_face(model_config))
    Store(to).save(0, {f"model/{name}": value for name, value in model.state_dict().items()}, {})


@pytest.mark.parametrize("tied", [False, True])
def test_import_then_export_gives_the_same_bytes(tmp_path, tokenizer_folder, tied):
    """transformers' own files, sharded or single, read on 3 ranks, replicas, tensor ranks: each tensor's bytes return."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    original = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=70,
            max_position_embeddings=32,
            tie_word_embeddings=tied,
            attention_bias=True,
        )
    )
    original.save_pretrained(tmp_path / "single")
    original.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    for name, replicate, shard, tensor in (("single", 2, 1, 1), ("shards", 1, 3, 1), ("shards", 1, 2, 2)):
        checkpoints = tmp_path / f"{name}_{tensor}_checkpoints"
        ranks = replicate * shard * tensor
        run_ranks(import_on_ranks, ranks, tmp_path / name, checkpoints, replicate, shard, tensor)
        folder = export(
            Store(checkpoints).newest(),
            tmp_path / f"{name}_{tensor}_again",
            read_hf_config(tmp_path / name),
            tokenizer_folder,
        )
        before = load_file(tmp_path / "single" / "model.safetensors")
        again = load_file(folder / "model.safetensors")
        assert set(before) == set(again)
        for key in before:
            assert torch.equal(before[key].view(torch.int32), again[key].view(torch.int32)), key


def refuse_on_ranks(source: Path) -> str:
    model, _ = model_on_ranks(config(), 1, 2)
    try:
        load_weights(dict(model.named_parameters()), source, to_hugging_face(config()))
    except KieloError as error:
        return str(error)
    return "loaded"


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    """Missing, unexpected, of another shape, cut short: the tensor or file is named, on every rank."""
    model = plain_model(config(), seed=5)
    names = to_hugging_face(config())
    right = {names[ours]: value.detach() for ours, value in model.state_dict().items()}
    parameters = dict(Llama(config()).named_parameters())

    def complaint(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(KieloError) as caught:
            load_weights(parameters, tmp_path, names)
        return str(caught.value)

    with pytest.raises(KieloError, match="neither model.safetensors nor"):
        load_weights(parameters, tmp_path, names)
    headless = {name: value for name, value in right.items() if name != "lm_head.weight"}
    assert "missing: lm_head.weight" in complaint(headless)
    assert "does not have: model.layers.9.x" in complaint(right | {"model.layers.9.x": torch.zeros(1)})
    assert "[70, 16], but head.weight here is [67, 16]" in complaint(
        right | {"lm_head.weight": torch.zeros(70, 16)}
    )
    assert "is stored as I8" in complaint(right | {"model.norm.weight": torch.zeros(16, dtype=torch.int8)})

    half = {name: value.half() for name, value in right.items()}
    save_file(
        half | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    load_weights(parameters, tmp_path, names)
    assert parameters["head.weight"].dtype == torch.float32
    assert torch.equal(parameters["head.weight"], half["lm_head.weight"].float())

    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-10])
    first, second = run_ranks(refuse_on_ranks, 2, tmp_path, timeout_seconds=60)
    assert first == second and "model.safetensors: cannot be read" in first


def test_weights_are_found_by_folder_or_by_name(tmp_path, monkeypatch):
    """hf:FOLDER needs no network; a name is asked of the hub, and a failure says both places."""
    import huggingface_hub

    assert resolve_weights(f"hf:{tmp_path}") == tmp_path
    with pytest.raises(KieloError, match="there is no folder ./nothing"):
        resolve_weights("hf:./nothing")
    asked = []

    def fetch(name, revision, allow_patterns):
        asked.append((name, revision))
        if name == "org/none":
            raise OSError("no network\nmore")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve_weights("hf:org/model@main") == tmp_path and asked == [("org/model", "main")]
    with pytest.raises(KieloError, match="no folder org/none, and .*no network"):
        resolve_weights("hf:org/none")
