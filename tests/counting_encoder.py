"""A small LTG-BERT that has learnt to count, as Hugging Face files, for `kielo verify position-heads`."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn import functional as F

from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.hugging_face_export import export
from kielo.models import families
from kielo.models.blocks.decoder import init_weights
from kielo.recipe.sections import Model

CONTROL, WORDS, LENGTH = ["[UNK]", "[SEP]", "[MASK]"], 12, 16
MASK = 2


def counting(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Sequences that count on from any word: a hidden one follows from its neighbours and their order."""
    first = torch.randint(0, WORDS, (rows, 1), generator=generator)
    return len(CONTROL) + (first + torch.arange(LENGTH)) % WORDS


def trained(folder: Path, way: str, steps: int) -> Path:
    """The export of a model with the relative positions of `way`, trained on counting, and its tokenizer."""
    (folder / "tokenizer").mkdir()
    names = {name: number for number, name in enumerate(CONTROL)}
    names |= {f"w{number}": len(CONTROL) + number for number in range(WORDS)}
    tokenizer = Tokenizer(WordLevel(names, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    roles = {"unk_token": "[UNK]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(roles))
    asked = Model(
        model_type="ltg_bert", hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, position_bucket_size=8, vocab_size=len(names), position_heads=way,
    )  # fmt: skip
    model = families.build_model(families.complete(asked, LENGTH))
    init_weights(model, 3)
    generator = torch.Generator().manual_seed(1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(steps):
        tokens = counting(32, generator)
        is_hidden = torch.rand(tokens.shape, generator=generator) < 0.15
        logits = model.logits(model(tokens.masked_fill(is_hidden, MASK))[is_hidden])
        F.cross_entropy(logits, tokens[is_hidden]).backward()
        optimiser.step()
        optimiser.zero_grad()
    checkpointer = Checkpointer(folder / "checkpoints")
    checkpointer.save(1, {f"model/{name}": value.detach() for name, value in model.named_parameters()}, {})
    return export(checkpointer.settle(), folder / "hf", model.config, folder / "tokenizer")


def text(folder: Path, words: int) -> Path:
    """Writes words that count on; returns the file."""
    path = folder / "text.txt"
    path.write_text(" ".join(f"w{number % WORDS}" for number in range(words)), encoding="utf-8")
    return path
