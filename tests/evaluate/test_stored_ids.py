"""Bits per byte of ready tokens are those of the stored ids, by transformers alone: no text in between."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kielo.artifact.token_shards import TokenShard
from tests.faults.trial import RECIPE, kielo, went_well, write_workplace
from tests.ready_tokens import rows_of, write_megatron

LENGTH, END = 16, 0


def plain_bits_per_byte(folder: Path, rows: list[list[int]]) -> float:
    """The rows as one stream after an end-of-text, in windows of 16 that go on by 8; only ids that no window
    before predicted count. Bytes are those of the text without control tokens, and one for each end.
    """
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    stream = np.concatenate([[END], *rows])
    nats, counted, end = 0.0, 0, LENGTH
    while counted < len(stream) - 1:
        window = torch.tensor(stream[end - LENGTH : end + 1])
        with torch.inference_mode():
            logits = model(window[None, :-1]).logits[0].double().log_softmax(-1)
        first = counted - (end - LENGTH)
        nats -= sum(logits[place, window[place + 1]].item() for place in range(first, LENGTH))
        counted, end = end, min(end + LENGTH // 2, len(stream) - 1)
    texts = tokenizer.batch_decode([row[:-1] for row in rows], skip_special_tokens=True)
    return nats / math.log(2) / sum(len(text.encode()) + 1 for text in texts)


@pytest.mark.full
def test_stored_ids_are_scored_as_transformers_scores_them(tmp_path: Path) -> None:
    """With control tokens within the documents, which text would spell in letters."""
    workplace = write_workplace(tmp_path / "workplace")
    went_well(kielo(workplace, "run", "tiny.toml", "--to", "pack", timeout=300))
    documents = rows_of(TokenShard(workplace / "run" / "tokens" / "text"))
    padding = 1
    for row in documents:  # a control token after every 25 ids
        for place in range(len(row) - 1, 0, -25):
            row.insert(place, padding)
    (workplace / "data").mkdir()
    write_megatron(workplace / "data" / "b", documents)
    text = RECIPE.replace('folder = "run"', 'folder = "ready"').replace(
        'sources = "text.txt"', 'sources = [{name = "web", tokens = "data"}]'
    )
    text = text.replace("vocab_size = 320", 'path = "run/tokenizer"')
    (workplace / "ready.toml").write_text(text, encoding="utf-8")
    went_well(kielo(workplace, "run", "ready.toml", "--to", "export", timeout=300))
    rows = rows_of(TokenShard(workplace / "ready" / "tokens" / "heldout"))
    assert any(padding in row for row in rows)
    scores = json.loads((workplace / "ready" / "evaluate" / "scores.json").read_text())
    # fp32 logits, and double sums in another order
    expected = plain_bits_per_byte(workplace / "ready" / "hf", rows)
    assert scores["bits_per_byte"]["model"] == pytest.approx(expected, rel=1e-5)
