"""Models of Hugging Face folders as they are loaded, and the text that one of them writes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kielo.evaluate import contender as module
from kielo.evaluate import generate as writing
from kielo.evaluate.contender import (
    Contender,
    causal_use,
    document_tokens,
    load_hugging_face,
    load_hugging_face_model,
    refuse_without_room,
    start_of_text_id,
)
from kielo.evaluate.generate import Sampling, continue_text
from kielo.recipe.errors import KieloError
from tests.evaluate.test_bits_per_byte import byte_tokenizer

FOLDER = Path("some") / "folder"


class Theirs:
    """A model of transformers with so many rows; it notes how it is called."""

    def __init__(self, rows: int = 300, **config: Any) -> None:
        self.config, self.rows, self.calls = SimpleNamespace(bos_token_id=None, **config), rows, []
        self.device = torch.device("cpu")

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(weight=torch.empty(self.rows, 7, device="meta"))

    def to(self, device: torch.device) -> "Theirs":
        return self

    def eval(self) -> "Theirs":
        self.calls.append("eval")
        return self

    def __call__(self, **how: Any) -> Any:
        self.calls.append(how)
        return SimpleNamespace(logits=how["input_ids"] * 2)

    def generate(self, tokens: torch.Tensor, streamer: Any, **how: Any) -> torch.Tensor:
        self.calls.append(how)
        written = torch.tensor([self.written])
        if streamer is not None:
            streamer.put(tokens)
            for token in self.written:
                streamer.put(torch.tensor([token]))
            streamer.end()
        return torch.cat((tokens, written), dim=1)


@pytest.mark.parametrize(
    ("bos_token_id", "start"), [(None, 44), (0, 0), (8, 8), (9, 44), (-1, 44), ([3], 44), ("3", 44)]
)
def test_the_first_token_is_the_models_own_if_it_has_one(bos_token_id: Any, start: int) -> None:
    """Of nine rows; else the end of text."""
    theirs = Theirs(9)
    theirs.config.bos_token_id = bos_token_id
    assert start_of_text_id(theirs, 44) == start


@pytest.mark.parametrize(
    ("longest", "asked", "length"),
    [
        (None, None, 2048), (None, 512, 512), (None, 4096, 2048), (512, None, 512), (512, 3000, 512),
        (4096, None, 2048), (4096, 3000, 3000), (0, None, 2048),
    ],
)  # fmt: skip
def test_windows_are_as_long_as_asked_and_the_model_allows(
    longest: int | None, asked: int | None, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = Theirs(max_position_embeddings=longest)
    monkeypatch.setattr(module, "load_tokenizer", lambda folder: byte_tokenizer())
    monkeypatch.setattr(module, "load_hugging_face_model", lambda folder, tokens, dtype: theirs)
    monkeypatch.setattr(module, "end_of_text_id", lambda tokenizer: 5)
    found = load_hugging_face(FOLDER, asked)
    assert (found.name, found.sequence_length, found.mask_documents) == (str(FOLDER), length, False)
    assert (found.start_id, found.end_of_text_id, found.module, found.first_ids) == (5, 5, None, ())
    tokens = torch.tensor([[4, 6]])
    assert found.logits(tokens, None).tolist() == [[8, 12]]
    assert theirs.calls == [{"input_ids": tokens, "use_cache": False}]
    assert found.documents(tokens) is None


def test_a_folder_is_loaded_from_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without code from there, and refused if tensors lack, or rows of the tokenizer."""
    theirs, missing, asked = Theirs(257), [], {}

    def from_pretrained(folder: Path, **how: Any) -> Any:
        asked.update(how)
        if folder != FOLDER:
            raise OSError("no such thing\nat all")
        return theirs, {"missing_keys": missing}

    fake = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setattr("transformers.AutoModelForCausalLM", fake)  # transformers replaces its own module
    assert load_hugging_face_model(FOLDER, 257, torch.float32) is theirs and theirs.calls == ["eval"]
    assert asked == {
        "dtype": torch.float32, "local_files_only": True, "output_loading_info": True,
        "trust_remote_code": False,
    }  # fmt: skip
    with pytest.raises(KieloError) as caught:
        load_hugging_face_model(FOLDER, 258, "auto")
    assert str(caught.value) == (
        f"{FOLDER}: the tokenizer has 258 tokens, and the model's vocabulary 257 rows, so they do not belong "
        "together"
    )
    missing += [f"w{number}" for number in (9, 3, 5, 1, 7, 2, 8, 4, 6)]
    with pytest.raises(KieloError) as caught:
        load_hugging_face_model(FOLDER, 257, "auto")
    assert str(caught.value) == (
        f"{FOLDER}: tensors of the model are missing: w1, w2, w3, w4, w5, w6, w7, w8"
    )
    with pytest.raises(KieloError) as caught:
        load_hugging_face_model(Path("other"), 257, "auto")
    assert str(caught.value) == (
        "other: not a causal language model that transformers can load (OSError: no such thing)"
    )


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """70 billion parameters in fp32 are 280 GB; eight ranks of 100 GB have room beside the weights."""
    for available, fits in ((281 * 10**9, True), (100 * 10**9, False)):
        monkeypatch.setattr(module, "host_memory", lambda size=available: SimpleNamespace(available=size))
        if fits:
            refuse_without_room("step", 70 * 10**9, torch.device("cpu"))
            continue
        with pytest.raises(KieloError, match=r"^step: its weights are 280\.0 GB in fp32, .* Fix: --ranks 8 "):
            refuse_without_room("step", 70 * 10**9, torch.device("cpu"))


def test_documents_are_one_stream() -> None:
    tokenizer = byte_tokenizer()
    a, b = (tokenizer.whole.token_to_id(letter) for letter in "ab")
    found = document_tokens(tokenizer, 0, ["ab", "", "b"], (9, 8))
    assert found.tolist() == [9, 8, a, b, 0, 9, 8, 0, 9, 8, b, 0] and found.dtype == np.int64
    assert document_tokens(tokenizer, 6, ["a"]).tolist() == [a, 6]


def test_a_document_ends_with_its_end_of_text() -> None:
    """A model that was trained without such a mask gets no numbers."""
    given = Contender("a", None, byte_tokenizer(), 0, 7, 16, True, torch.device("cpu"))
    tokens = torch.tensor([[5, 7, 6, 7, 7, 1], [1, 2, 3, 4, 5, 7]])
    found = given.documents(tokens)
    assert found.tolist() == [[0, 0, 1, 1, 2, 3], [0] * 6] and found.dtype == torch.int32
    assert replace(given, mask_documents=False).documents(tokens) is None


@pytest.mark.parametrize("cls_id", [None, 4])
@pytest.mark.parametrize("begins", [True, False])
def test_in_causal_use_every_document_is_causal(
    cls_id: int | None, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number is negative, also where there are no numbers; `[CLS]` begins it where training had it."""

    class Ours:
        def __call__(self, tokens: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
            return tokens * 100 + documents

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + 0.5

    monkeypatch.setattr(module, "begins_with_cls", lambda recipe: begins)
    monkeypatch.setattr(module, "role_id", lambda tokenizer, role: cls_id if role == "cls_token" else 9)
    given = Contender("a", None, byte_tokenizer(), 0, 0, 16, True, torch.device("cpu"), Ours())
    found = causal_use(given, SimpleNamespace())
    tokens, documents = torch.tensor([[1, 2]]), torch.tensor([[0, 3]])
    assert found.logits(tokens, documents).tolist() == [[99.5, 196.5]]
    assert found.logits(tokens, None).tolist() == [[99.5, 199.5]]
    assert found.first_ids == ((4,) if begins and cls_id is not None else ())


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Theirs:
    """A model that writes "ab" and the end, after byte tokens."""
    theirs = Theirs()
    a, b = (byte_tokenizer().whole.token_to_id(letter) for letter in "ab")
    theirs.written, theirs.seeds = [a, b, 0], []
    monkeypatch.setattr(writing, "load_tokenizer", lambda folder: byte_tokenizer())
    monkeypatch.setattr(writing, "end_of_text_id", lambda tokenizer: 0)
    monkeypatch.setattr(writing, "set_seed", theirs.seeds.append)
    monkeypatch.setattr(
        writing, "load_hugging_face_model", lambda folder, tokens, dtype: theirs if tokens == 257 else dtype
    )

    def decode(ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        kept = [int(one) for one in ids if int(one) or not skip_special_tokens]
        return byte_tokenizer().whole.decode(kept, skip_special_tokens=False)

    def from_pretrained(folder: Path, local_files_only: bool) -> Any:
        return SimpleNamespace(decode=decode) if local_files_only else None

    monkeypatch.setattr(writing, "AutoTokenizer", SimpleNamespace(from_pretrained=from_pretrained))
    return theirs


def test_a_text_is_continued_up_to_its_end(theirs: Theirs, capsys: pytest.CaptureFixture) -> None:
    """It is printed while it grows, without the prompt and the end; a temperature of 0 draws nothing."""
    assert continue_text(FOLDER, "tere", Sampling()) == "ab"
    assert capsys.readouterr().out == "ab\n" and theirs.seeds == [1]
    (how,) = theirs.calls
    assert how.pop("attention_mask").tolist() == [[1, 1, 1, 1, 1]]
    assert how == {
        "max_new_tokens": 200, "eos_token_id": [0], "logits_processor": [], "pad_token_id": 0,
        "do_sample": True, "temperature": 0.8,
        "top_k": 50,
    }  # fmt: skip
    theirs.written = theirs.written[:2]
    asked = Sampling(num_tokens=2, temperature=0, top_k=3, seed=6)
    assert continue_text(FOLDER, "tere", asked, prints=False) == "ab"
    assert capsys.readouterr().out == "" and theirs.seeds == [1, 6]
    how = theirs.calls[1]
    assert {key: how[key] for key in how if key != "attention_mask"} == {
        "max_new_tokens": 2, "eos_token_id": [0], "logits_processor": [], "pad_token_id": 0,
        "do_sample": False, "temperature": None,
        "top_k": None, "top_p": None,
    }  # fmt: skip
    theirs.written = [0]
    assert continue_text(FOLDER, "", Sampling(), prints=False) == ""
