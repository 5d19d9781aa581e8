"""The nearest old tokens of new ones are those of the whole matrices, and other weights are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kielo.checkpoint import nearest_tokens as module
from kielo.checkpoint.nearest_tokens import Vocabularies, nearest_tokens
from kielo.models.families import hf_config
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import load_tokenizer
from kielo.tokenizer.make_row_map import example_ids, make_row_map
from kielo.tokenizer.spelling import TokenNames
from kielo.tokenizer.train import save, train_on
from tests.checkpoint.layouts import config

TEXTS = {
    "old": [f"The house of {n} rivers and the rivers of the house, said the reader." for n in range(60)],
    "new": [f"Maja ja jõgi {n}: öö läheb, jõed ja majad, mitte maja." for n in range(60)],
}


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory) -> Vocabularies:
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, texts in TEXTS.items():
        recipe = Recipe(name="t", language="et", corpus={"sources": ["a"]}, tokenizer={"vocab_size": 340})
        save(train_on(texts, recipe), folder / name)
    old, new = (load_tokenizer(folder / name) for name in TEXTS)
    return Vocabularies(old, new, make_row_map(old, new, "mean"))


def write_model(folder: Path, num_rows: int) -> np.ndarray:
    """Writes transformers' own files; returns the embedding."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**hf_config(config(vocab_size=num_rows))))
    model.save_pretrained(folder)
    return model.model.embed_tokens.weight.detach().double().numpy()


def test_neighbours_are_those_of_the_whole_matrices(tmp_path, vocabularies, monkeypatch):
    """Means and cosines of the whole embedding in fp64, to the rounding of fp32; blocks of seven rows."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 7 * 16 * 4)
    num_old = vocabularies.row_map.old_vocabulary_size
    whole = write_model(tmp_path, num_old + 6)[:num_old]  # rows of no token are nobody's neighbours
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, **options: empty(*size, **options).fill_(2)
    )  # no cosine
    found = nearest_tokens(tmp_path, vocabularies).tokens
    ids = example_ids(vocabularies.row_map, 50)
    old_names, new_names = TokenNames(vocabularies.old), TokenNames(vocabularies.new)
    assert [one.token for one in found] == [new_names(new_id) for new_id in ids]
    assert len(found) > 20
    unit = whole / np.linalg.norm(whole, axis=1)[:, None]
    for one, new_id in zip(found, ids):
        row = whole[vocabularies.row_map.rows[new_id]].mean(axis=0)
        cosines = unit @ row / np.linalg.norm(row)
        nearest = np.argsort(-cosines)[:5]
        assert [near.token for near in one.nearest] == [old_names(int(number)) for number in nearest]
        assert [near.cosine for near in one.nearest] == pytest.approx(cosines[nearest], abs=1e-6)
        assert one.nearest_in_words().startswith(f"{one.nearest[0].token} {cosines.max():.2f}, ")
    monkeypatch.setattr(module, "BLOCK_BYTES", 16 * 4 - 1)  # less than a row: one at a time
    again = nearest_tokens(tmp_path, vocabularies, number=7).tokens
    few = [new_names(new_id) for new_id in example_ids(vocabularies.row_map, 7)]
    assert [one.token for one in again] == few and len(few) == 7
    nearest = {one.token: [near.token for near in one.nearest] for one in found}
    for one in again:
        assert nearest.get(one.token, one) in ([near.token for near in one.nearest], one)


def test_weights_of_fewer_tokens_are_refused(tmp_path, vocabularies):
    write_model(tmp_path, vocabularies.row_map.old_vocabulary_size - 1)
    with pytest.raises(KieloError, match=r"safetensors: the embedding has the shape .* what would work"):
        nearest_tokens(tmp_path, vocabularies)
