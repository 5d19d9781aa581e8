"""Texts with [MASK] as people write them, encoded by transformers from the files that Kielo wrote."""

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Recipe
from kielo.tokenizer.learn_vocabulary import extend
from kielo.tokenizer.load import load_tokenizer
from kielo.tokenizer.train import ENCODER_TOKENS, save, train_on
from tests.tokenizer.test_unigram import texts

TEXT = "\n".join(texts()[:40])
WORD = re.compile(r" \w{2,}(?!\w)")


def encoder_recipe(model: str) -> Recipe:
    recipe = read_recipe("demo_estonian").recipe
    sections = {
        "tokenizer": recipe.tokenizer.model_copy(update={"vocab_size": 600, "model": model}),
        "train": recipe.train.model_copy(update={"objective": "masked_tokens"}),
    }
    return recipe.model_copy(update=sections)


@pytest.fixture(scope="module", params=["bpe", "unigram", "extended", "saved again"])
def folder(request, tmp_path_factory) -> Path:
    """Return the folder of a tokenizer that Kielo trained, that it extended, or that transformers wrote."""
    folder = tmp_path_factory.mktemp("tokenizer")
    model = "unigram" if request.param == "unigram" else "bpe"
    save(train_on(texts(), encoder_recipe(model)), folder, None, ENCODER_TOKENS)
    if request.param == "extended":
        save(extend(load_tokenizer(folder), ["vares vares"] * 9, 605), folder, None, ENCODER_TOKENS)
    if request.param == "saved again":
        AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    return folder


def test_a_mask_stands_where_training_hides_a_token(folder):
    """For each word that is one token with its space: the text with " [MASK]" in the word's place has the
    ids of the text, with the mask's id in that place alone. So have two masks, and a mask without the space.
    """
    theirs = AutoTokenizer.from_pretrained(folder)
    encoded = theirs(TEXT, return_offsets_mapping=True)
    ids, places = encoded["input_ids"], encoded["offset_mapping"]
    spans = {word.span() for word in WORD.finditer(TEXT)}
    words = [(number, *span) for number, span in enumerate(places) if span in spans]
    assert len(words) > 20
    for number, begin, end in words[::15]:
        expected = [*ids[:number], theirs.mask_token_id, *ids[number + 1 :]]
        for written in (" [MASK]", "[MASK]"):
            assert theirs(TEXT[:begin] + written + TEXT[end:])["input_ids"] == expected
    assert theirs("jõgi [MASK] [MASK]")["input_ids"] == theirs("jõgi[MASK][MASK]")["input_ids"]
    assert theirs(" [MASK] jõgi")["input_ids"] == theirs("[MASK] jõgi")["input_ids"]


def test_only_the_mask_takes_space_in(folder):
    """The other control tokens stand between texts, whose spaces are text."""
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    flags = {one["content"]: (one["lstrip"], one["rstrip"], one["normalized"]) for one in added}
    masks = dict.fromkeys(ENCODER_TOKENS.values(), (False, False, False)) | {"[MASK]": (True, False, False)}
    assert {name: flags[name] for name in masks} == masks
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert whole.encode("jõgi [SEP]").ids != whole.encode("jõgi[SEP]").ids
