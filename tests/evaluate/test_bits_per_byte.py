"""Promises of held-out bits per byte: each token once, as much context as there is, end-of-text included."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kielo.evaluate import contender as module
from kielo.evaluate.contender import (
    Contender,
    counted_bytes,
    token_stream_bits,
    windows,
)
from kielo.evaluate.generate import default_prompts, generate, opening, pick
from kielo.recipe.errors import KieloError
from kielo.tokenizer.load import TextTokenizer, encode

VOCAB = 300  # 257 tokens, the rest pads the embedding


def byte_tokenizer() -> TextTokenizer:
    """One token a byte, and the end-of-text token 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|endoftext|>": 0} | {char: number for number, char in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(tokenizer, Path("in no folder"), "<|endoftext|>")


def bits_per_byte(of: Contender, texts: list[str]) -> float:
    tokens = of.encode_documents(texts)
    return token_stream_bits(of, tokens, counted=of.counted(tokens)) / counted_bytes(texts)


def contender(logits, sequence_length: int = 16, mask_documents: bool = False) -> Contender:
    return Contender(
        "test", logits, byte_tokenizer(), 0, 0, sequence_length, mask_documents, torch.device("cpu")
    )


def bigram(tokens_bs: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    """Logits that depend on the last token alone: windows cannot change the score."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    return table[tokens_bs]


@given(st.integers(0, 200), st.integers(1, 40), st.data())
def test_windows_count_each_prediction_once(num_tokens: int, length: int, data: st.DataObject) -> None:
    """Whatever the sizes: all inside the stream, every prediction counted once, in order,
    with context before it.
    """
    stride = data.draw(st.integers(1, length))
    counted = []
    size = min(length, num_tokens)
    for number, (start, first) in enumerate(windows(num_tokens, length, stride)):
        assert start >= 0
        assert number == 0 or first >= size - stride
        counted += range(start + first, start + size)
    assert counted == list(range(num_tokens))


@pytest.mark.parametrize("stride", [None, 1, 7, 16])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 100])
def test_bits_do_not_depend_on_windows_for_a_bigram(stride: int | None, num_tokens: int) -> None:
    """A model that looks one token back has one score, computed here directly; the first token costs too."""
    tokens = np.random.default_rng(1).integers(0, VOCAB, num_tokens)
    stream = torch.tensor([0, *tokens])
    logits = torch.log_softmax(bigram(stream[:-1], None), dim=-1)
    expected = -logits[torch.arange(num_tokens), stream[1:]].double().sum().item() / np.log(2)
    assert token_stream_bits(contender(bigram), tokens, stride) == pytest.approx(expected, rel=1e-5)


def test_uniform_model_pays_for_every_border() -> None:
    """Two documents of 3 and 5 bytes under a uniform model: 8 byte tokens and 2 end-of-text over 10 bytes."""
    uniform = contender(lambda tokens_bs, _: torch.zeros(*tokens_bs.shape, VOCAB))
    texts = ["abc", "öäa"]
    assert counted_bytes(texts) == 3 + 5 + 2
    assert bits_per_byte(uniform, texts) == pytest.approx(np.log2(VOCAB))


def test_documents_are_numbered_as_in_training() -> None:
    """End-of-text belongs to the document that it ends; without masking the model is given no numbers."""
    tokens = torch.tensor([[0, 5, 6, 0, 7, 0]])
    assert contender(bigram, mask_documents=True).documents(tokens).tolist() == [[0, 1, 1, 1, 2, 2]]
    assert contender(bigram).documents(tokens) is None


def test_generation_is_seeded_and_stays_in_the_vocabulary() -> None:
    """Same seed, same text; another seed, another; padding rows are never drawn;
    a likely end-of-text ends it.
    """

    def flat(tokens_bs: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        logits = torch.zeros(*tokens_bs.shape, VOCAB)
        logits[..., 0] = -50.0
        logits[..., 257:] = 50.0  # the rows that only pad would win
        return logits

    model = contender(flat)
    first = generate(model, "tere", 30, 1.0, 50, seed=1)
    assert (
        first == generate(model, "tere", 30, 1.0, 50, seed=1) != generate(model, "tere", 30, 1.0, 50, seed=2)
    )
    ending = contender(lambda tokens_bs, _: torch.eye(VOCAB)[torch.zeros_like(tokens_bs)])
    assert generate(ending, "tere", 30, 0.0, 50, seed=1) == ""


def test_prompts_are_openings_of_heldout_documents() -> None:
    """Three different openings of at most five words; short texts serve where there is nothing longer."""
    texts = [f"Pealkiri {number}\nsee on päris pikk lause selle kohta " * 9 for number in range(9)]
    prompts = default_prompts(["lühike", *texts])
    assert prompts == [f"Pealkiri {number} see on päris" for number in (1, 4, 7)]
    assert default_prompts(["tere"]) == ["tere"] * 3


def test_windows_by_hand() -> None:
    """Ten tokens in windows of four: the first counts all, each later one as many as it advances."""
    assert list(windows(10, 4, 2)) == [(0, 0), (2, 2), (4, 2), (6, 2)]
    assert list(windows(10, 4, 3)) == [(0, 0), (3, 1), (6, 1)]
    assert list(windows(9, 4, 4)) == [(0, 0), (4, 0), (5, 3)]
    assert list(windows(3, 4, 2)) == [(0, 0)] and list(windows(0, 4, 2)) == []
    for stride in (0, 5):
        with pytest.raises(KieloError, match=f"stride = {stride}. Fix: 1 to the sequence"):
            list(windows(10, 4, stride))


@pytest.mark.parametrize("most", [1, 32, 40])
def test_only_tokens_that_count_have_bits(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many windows are scored at once, by tokens or by logits."""
    monkeypatch.setattr(module, "MOST_TOKENS_PER_FORWARD", most)
    monkeypatch.setattr(module, "MOST_LOGITS_PER_FORWARD", most * VOCAB)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 50)
    is_counted = np.arange(50) % 3 == 1
    stream = torch.tensor([0, *tokens])
    nats = -torch.log_softmax(bigram(stream[:-1], None), dim=-1)[torch.arange(50), stream[1:]].double()
    expected = nats[torch.from_numpy(is_counted)].sum().item() / np.log(2)
    assert token_stream_bits(contender(bigram), tokens, 5, is_counted) == pytest.approx(expected, rel=1e-5)


def test_one_token_is_drawn_by_its_probability() -> None:
    """Of the likeliest two, at half the temperature: 1 / (1 + e^-2) for a logit that is 1 higher."""
    logits, generator = torch.tensor([0.0, 2.0, 1.0, -9.0]), torch.Generator().manual_seed(3)
    drawn = [pick(logits, 0.5, 2, generator) for _ in range(2000)]
    assert set(drawn) == {1, 2} and abs(drawn.count(1) / 2000 - 1 / (1 + np.exp(-2))) < 0.03
    assert {pick(logits, 9.0, 99, generator) for _ in range(500)} == {0, 1, 2, 3}
    assert [pick(logits, 0, 4, generator), pick(logits, 5.0, 1, generator)] == [1, 1]


def test_a_continuation_sees_one_sequence_and_has_as_many_tokens_as_are_asked_for() -> None:
    """The model is given the start, the prompt and what it wrote, the last tokens that fit."""
    seen: list[list[int]] = []

    def counting(tokens_bs: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        seen.append(tokens_bs[0].tolist())
        logits = torch.zeros(*tokens_bs.shape, VOCAB)
        logits[..., :-1, 7] = logits[..., -1, tokens_bs[0, -1] + 1] = 9.0
        return logits

    model = contender(counting, sequence_length=4)
    first = encode(model.tokenizer, ["A"])[0][0]
    text = generate(model, "A", 4, 0.0, 50, seed=1)
    assert text == "BCDE"
    assert seen == [
        [0, first],
        [0, first, first + 1],
        [0, first, first + 1, first + 2],
        [first, first + 1, first + 2, first + 3],
    ]


def test_an_opening_is_five_words_of_80_characters_at_most() -> None:
    assert opening("one  two\nthree four five six") == "one two three four five"
    assert opening("ab " + 400 * "x") == "ab " + 77 * "x"
    assert opening(79 * "x" + " yz") == 79 * "x" and opening(" \n") == ""
    assert default_prompts(["", "a b", "a b", "c"], 2) == ["a b", "c"]
    assert default_prompts([" "], 2) == ["", ""]
    long, short = "long " * 33, "short " * 26  # 165 and 156 characters: beyond 160 a document is long enough
    assert default_prompts([short, long], 1) == ["long long long long long"]


@pytest.mark.parametrize(
    ("tokens", "logits", "at_once"),
    [(1, 10**9, [1] * 12), (63, 10**9, [1, 3, 3, 3, 2]), (10**9, 3 * 16 * VOCAB, [1, 3, 3, 3, 2]),
     (10**9, 16 * VOCAB - 1, [1] * 12), (10**9, 10**9, [1, 11])],
)  # fmt: skip
def test_as_many_windows_are_scored_at_once_as_memory_has_room_for(
    tokens: int, logits: int, at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 tokens, the first one alone; a window is never too large."""
    monkeypatch.setattr(module, "MOST_TOKENS_PER_FORWARD", tokens)
    monkeypatch.setattr(module, "MOST_LOGITS_PER_FORWARD", logits)
    seen: list[int] = []

    def counting(tokens_bs: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
        seen.append(len(tokens_bs))
        return bigram(tokens_bs, documents)

    token_stream_bits(contender(counting), np.zeros(16 + 11 * 8, np.int64))
    assert seen == at_once
