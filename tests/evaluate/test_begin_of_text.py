"""A Hugging Face folder is scored and continued after what its tokenizer puts before a text."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kielo.evaluate.contender import load_hugging_face
from kielo.evaluate.generate import Sampling, continue_text, generate
from tests.evaluate.test_bits_per_byte import bits_per_byte
from tests.tokenizer.test_text_frame import write_tokenizer

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXTS = ["Õhtul tuli lumi.", "kaks", "12 öösel"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("hf"), "llama 3")
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=261, bos_token_id=1, eos_token_id=0, initializer_range=0.4, **SIZES)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_bits_are_those_of_transformers(folder) -> None:
    """Of each text's tokens and its end, after <s>, which is given; by a plain script."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    rows = [[*tokenizer(text).input_ids, 0] for text in TEXTS]
    stream = torch.tensor([[0, *sum(rows, [])]])
    with torch.no_grad():
        chances = model(stream).logits[0].log_softmax(-1)
    bits, place = 0.0, 0
    for row in rows:
        for offset, token in enumerate(row):
            bits -= float(chances[place + offset, token]) / torch.log(torch.tensor(2.0)) * (offset > 0)
        place += len(row)
    num_bytes = sum(len(text.encode()) + 1 for text in TEXTS)
    assert bits_per_byte(load_hugging_face(folder), TEXTS) == pytest.approx(float(bits) / num_bytes, rel=1e-5)


def test_a_prompt_is_continued_as_transformers_does(folder) -> None:
    """The likeliest tokens after `tokenizer(prompt)`, in both ways of writing."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer("lumi", return_tensors="pt")
    written = model.generate(**asked, max_new_tokens=12, do_sample=False, eos_token_id=0, pad_token_id=0)
    new = written[0, asked.input_ids.shape[1] :].tolist()
    expected = tokenizer.decode(new[: new.index(0)] if 0 in new else new)
    assert continue_text(folder, "lumi", Sampling(num_tokens=12, temperature=0), prints=False) == expected
    assert generate(load_hugging_face(folder), "lumi", 12, 0, 50, seed=1) == expected
