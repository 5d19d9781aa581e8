"""Tied models whose files hold the head too, or only the head: values are those that transformers loads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from kielo.checkpoint import export_tensors
from kielo.checkpoint.hugging_face_import import load_model_weights
from kielo.models import families
from kielo.recipe.errors import KieloError
from kielo.verify.round_trip import verify_round_trip
from tests.models.equality import pair
from tests.models.tiny_configs import TINY, VOCABULARY

EMBEDDING = "model.embed_tokens.weight"
TIED = {
    "llama, llama3 rope, tied": (EMBEDDING, "lm_head.weight"),
    "gemma2": (EMBEDDING, "lm_head.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "opt": ("model.decoder.embed_tokens.weight", "lm_head.weight"),
    "bloom": ("transformer.word_embeddings.weight", "lm_head.weight"),
    "modernbert": ("model.embeddings.tok_embeddings.weight", "decoder.weight"),
}
TOKENS = torch.arange(20).view(2, 10)


@pytest.fixture(params=list(TIED))
def tied(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, str]:
    """Return the folder of a tied model, with its embedding's and its head's name."""
    pair(TINY[request.param], tmp_path)
    return tmp_path, *TIED[request.param]


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Store other tensors in the folder of one file; None removes a tensor."""
    stored = load_file(folder / "model.safetensors") | changes
    kept = {name: value for name, value in stored.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def untie(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def logits(folder: Path) -> tuple[torch.Tensor, dict[str, str]]:
    """Return the logits of the model as Kielo reads it, and the record of its tensors."""
    model = families.read_hf_config(folder)
    ours = families.build_model(model).eval()
    record = load_model_weights(dict(ours.named_parameters()), folder, model)
    return ours.logits(ours(TOKENS, None))[..., :VOCABULARY], record


@torch.no_grad()
def their_logits(folder: Path) -> torch.Tensor:
    is_encoder = "modernbert" in (folder / "config.json").read_text()
    load = (AutoModelForMaskedLM if is_encoder else AutoModelForCausalLM).from_pretrained
    return load(folder, dtype=torch.float32, attn_implementation="eager").eval()(TOKENS).logits


def test_a_head_alone_is_the_embedding(tied: tuple[Path, str, str]) -> None:
    """The model is that of transformers, and its export, which has both, comes back."""
    folder, embedding, head = tied
    rewrite(folder, **{head: load_file(folder / "model.safetensors")[embedding], embedding: None})
    found, record = logits(folder)
    torch.testing.assert_close(found, their_logits(folder), rtol=1e-5, atol=1e-5)
    assert record.keys() == {embedding, *load_file(folder / "model.safetensors")}
    result = verify_round_trip(str(folder), folder / "again")
    assert result["passed"], result["differences"]
    torch.testing.assert_close(their_logits(folder / "again"), found, rtol=1e-5, atol=1e-5)


def test_a_head_of_other_values_is_refused(
    tied: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fix that the refusal offers gives the logits that it promises."""
    folder, embedding, head = tied
    monkeypatch.setattr(export_tensors, "BLOCK_BYTES", 8)  # rows are compared in many blocks
    rows = load_file(folder / "model.safetensors")[embedding].clone()
    as_tied = their_logits(folder)
    rewrite(folder, **{head: rows.clone()})
    torch.testing.assert_close(logits(folder)[0], as_tied, rtol=1e-5, atol=1e-5)
    rows[-1, -1] += 0.5
    rewrite(folder, **{head: rows})
    as_stored = their_logits(folder)
    assert not torch.allclose(as_stored, as_tied)
    with pytest.raises(KieloError) as caught:
        logits(folder)
    said = str(caught.value)
    assert said.startswith(f"{folder / 'model.safetensors'}: {head} has other values than {embedding}, and")
    can_untie = head != "decoder.weight"
    assert (f'Fix: "tie_word_embeddings": false in {folder / "config.json"}' in said) is can_untie
    if can_untie:
        untie(folder)
        torch.testing.assert_close(logits(folder)[0], as_stored, rtol=1e-5, atol=1e-5)
        return
    rewrite(folder, **{head: None})
    torch.testing.assert_close(logits(folder)[0], as_tied, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (lambda rows: rows[:-1], "lm_head.weight has other values than"),
        (lambda rows: rows.bfloat16(), "lm_head.weight has other values than"),
        (lambda rows: torch.cat([rows, rows[:1]]), "lm_head.weight has other values than"),
        (lambda rows: rows * float("nan"), "lm_head.weight has other values than"),
    ],
    ids=["fewer rows", "rounded", "more rows", "not finite"],
)
def test_other_heads_that_are_no_copy(head, told: str, tmp_path: Path) -> None:
    """Rows, roundings and values that a copy would not have are refused."""
    pair(TINY["llama, llama3 rope, tied"], tmp_path)
    rewrite(tmp_path, **{"lm_head.weight": head(load_file(tmp_path / "model.safetensors")[EMBEDDING])})
    with pytest.raises(KieloError, match=told):
        logits(tmp_path)


def test_values_that_no_fp32_has_in_both(tmp_path: Path) -> None:
    """A copy with NaN is refused for its NaN, and not for a head that differs."""
    pair(TINY["llama, llama3 rope, tied"], tmp_path)
    rows = load_file(tmp_path / "model.safetensors")[EMBEDDING] * float("nan")
    rewrite(tmp_path, **{"lm_head.weight": rows, EMBEDDING: rows.clone()})
    with pytest.raises(KieloError, match="numbers that are NaN"):
        logits(tmp_path)


def test_neither_is_missing(tmp_path: Path) -> None:
    """Without embedding and head, the embedding is named."""
    pair(TINY["llama, llama3 rope, tied"], tmp_path)
    rewrite(tmp_path, **{EMBEDDING: None})
    with pytest.raises(KieloError, match=f"tensors of the model are missing: {EMBEDDING}$"):
        logits(tmp_path)
