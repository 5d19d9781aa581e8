"""Weights from Hugging Face go back byte for byte: names, dtypes, shapes and bits of every tensor."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kielo.checkpoint import hugging_face_export
from kielo.cli.main import main
from kielo.recipe.errors import KieloError
from kielo.verify.round_trip import verdict, verify_round_trip

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 70, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    """The folder where the check may write; nothing of it may stay."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def made_by_transformers(folder: Path, tied: bool, dtype: torch.dtype = torch.float32, **saving) -> Path:
    """70 rows of vocabulary are padded to 128 inside Kielo."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied, attention_bias=True))
    model.to(dtype).save_pretrained(folder, **saving)
    return folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_transformers_saved_comes_back(tmp_path, temporary, tied, dtype):
    """Sharded, tied or not, in each dtype; the kept export is the same to transformers' own reader,
    all else is gone.
    """
    source = made_by_transformers(tmp_path / "source", tied, dtype, max_shard_size="4KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    result = verify_round_trip(f"hf:{source}", keep=tmp_path / "kept")
    assert result["passed"] and not result["differences"] and "Round trip holds" in verdict(result)
    before = {name: value for path in source.glob("*.safetensors") for name, value in load_file(path).items()}
    after = load_file(tmp_path / "kept" / "model.safetensors")
    assert before.keys() == after.keys() == result["tensors"].keys()
    assert ("lm_head.weight" in after) == (not tied)
    for name, value in before.items():
        assert value.dtype == after[name].dtype == dtype
        assert torch.equal(value.view(torch.uint8), after[name].view(torch.uint8)), name
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["vocab_size"] == 70
    assert not list(temporary.glob("kielo*"))
    with pytest.raises(KieloError, match="exists already"):
        verify_round_trip(str(source), keep=tmp_path / "kept")


def test_mixed_dtypes_a_stored_tied_head_and_old_buffers(tmp_path):
    """Each tensor keeps its own dtype, a head that is stored though tied stays,
    and buffers are named as left out.
    """
    source = made_by_transformers(tmp_path / "source", tied=True, dtype=torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    for number, name in enumerate(sorted(tensors)):
        tensors[name] = tensors[name].to((torch.bfloat16, torch.float32, torch.float16)[number % 3])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(tensors | {buffer: torch.ones(2)}, source / "model.safetensors")
    result = verify_round_trip(str(source))
    assert result["passed"] and result["left_out"] == [buffer]
    assert result["tensors"].keys() == tensors.keys()
    assert {what["dtype"] for what in result["tensors"].values()} == {"BF16", "F32", "F16"}


def test_a_bare_base_model_and_pytorch_files(tmp_path):
    """Files without the base model's prefix, and `pytorch_model.bin`, are compared in the same way."""
    source = made_by_transformers(tmp_path / "source", tied=True, dtype=torch.float16)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(
        {name.removeprefix("model."): value for name, value in tensors.items()}, source / "pytorch_model.bin"
    )
    result = verify_round_trip(str(source))
    assert result["passed"] and "embed_tokens.weight" in result["tensors"]


def test_a_difference_is_named_and_fails(tmp_path, temporary, capsys, monkeypatch):
    """Exit code 1 and the first tensor that differs:
    one flipped bit, and a head that is not its embedding.
    """
    source = made_by_transformers(tmp_path / "source", tied=True)
    assert main(["verify", "round-trip", str(source), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] and len(result["tensors"]) == 28

    class Flipping(hugging_face_export.CheckpointRows):
        def read(self, tensor, rows):
            block = super().read(tensor, rows)
            if tensor.name == "model.layers.1.mlp.up_proj.weight":
                block[3].view(torch.uint8)[5] ^= 1
            return block

    with monkeypatch.context() as patch:
        patch.setattr(hugging_face_export, "CheckpointRows", Flipping)
        assert main(["verify", "round-trip", str(source)]) == 1
    told = capsys.readouterr().out
    assert (
        "NO round trip: 1 of 28 tensors differ; first model.layers.1.mlp.up_proj.weight: F32 [24, 16]" in told
    )

    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.randn(70, 16)}, source / "model.safetensors")
    assert main(["verify", "round-trip", str(source)]) == 1
    assert "lm_head.weight" in capsys.readouterr().err
    assert main(["verify", "round-trip", str(tmp_path / "gone")]) == 1
    assert "no such folder" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    assert main(["verify", "round-trip", str(tmp_path / "run")]) == 1
    told = capsys.readouterr().err
    assert "run: no config.json there, so it is no Hugging Face folder" in told and "Fix: " not in told
    (tmp_path / "run" / "hf").symlink_to(source)
    assert main(["verify", "round-trip", str(tmp_path / "run")]) == 1
    assert f"folder. Fix: {tmp_path / 'run' / 'hf'}\n" in capsys.readouterr().err
    assert not list(temporary.glob("kielo*"))
