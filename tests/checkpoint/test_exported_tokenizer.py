"""Exported tokenizers in other people's programs: truncation, padding, names that converters ask for."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, DataCollatorForLanguageModeling

from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.hugging_face_export import export
from kielo.models import families
from kielo.models.blocks.decoder import init_weights
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Model
from kielo.tokenizer.train import ENCODER_TOKENS, save, train_on

CONTEXT = 32
LONG = "tere maailm, koer ja kass " * 40


@pytest.fixture(scope="module", params=["gpt2", "opt", "llama", "modernbert"])
def folder(request, tmp_path_factory) -> Path:
    """Return the export of a small model with a tokenizer that Kielo trained."""
    folder, is_encoder = tmp_path_factory.mktemp("run"), request.param == "modernbert"
    recipe = read_recipe("demo_estonian").recipe
    sections = {"tokenizer": recipe.tokenizer.model_copy(update={"vocab_size": 270})}
    if is_encoder:
        sections["train"] = recipe.train.model_copy(update={"objective": "masked_tokens"})
    words = train_on([LONG], recipe.model_copy(update=sections))
    save(words, folder / "tokenizer", None, ENCODER_TOKENS if is_encoder else None)
    asked = Model(
        model_type=request.param, hidden_size=16, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, vocab_size=words.get_vocab_size(),
    )  # fmt: skip
    model = families.build_model(families.complete(asked, CONTEXT))
    init_weights(model, 3)
    checkpointer = Checkpointer(folder / "checkpoints")
    checkpointer.save(1, {f"model/{name}": value.detach() for name, value in model.named_parameters()}, {})
    return export(checkpointer.settle(), folder / "hf", model.config, folder / "tokenizer")


def test_a_long_text_is_cut_to_the_context_of_the_model(folder):
    """By the tokenizer alone, and the model computes what it gives: a table of positions ends there."""
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.model_max_length == CONTEXT and len(theirs(LONG)["input_ids"]) > CONTEXT
    inputs = theirs(LONG, truncation=True, return_tensors="pt")
    assert inputs["input_ids"].shape == (1, CONTEXT) and set(inputs) == {"input_ids", "attention_mask"}
    with torch.no_grad():
        assert AutoModel.from_pretrained(folder)(**inputs).last_hidden_state.shape[1] == CONTEXT


def test_a_trainer_of_others_learns_the_end_of_texts(folder):
    """The collator takes padding out of the loss; the end of a text stays in it. No name is left open."""
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.unk_token is not None and theirs.pad_token_id not in (None, theirs.eos_token_id)
    assert len(theirs) == json.loads((folder / "config.json").read_text())["vocab_size"]
    texts = [theirs(text, add_special_tokens=False)["input_ids"] for text in ("koer", "koer ja kass")]
    rows = [{"input_ids": [*ids, theirs.eos_token_id]} for ids in texts]
    batch = DataCollatorForLanguageModeling(theirs, mlm=False)(rows)
    for row, labels in zip(rows, batch["labels"].tolist(), strict=True):
        assert [label for label in labels if label != -100] == row["input_ids"]


def test_converters_find_the_context_of_a_gpt2(folder):
    """llama.cpp's reads `n_ctx`, which transformers does not write any more."""
    config = json.loads((folder / "config.json").read_text())
    expected = CONTEXT if config["model_type"] == "gpt2" else None
    assert config.get("n_ctx") == expected
