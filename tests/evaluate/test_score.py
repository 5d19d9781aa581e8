"""The scores of a model, put together: what is divided by what, by hand, of a model that knows nothing."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kielo.dataset.heldout_sets import HeldoutSet
from kielo.evaluate import score as module
from kielo.evaluate.baselines import ByteNgram, byte_stream, xz_bits
from kielo.evaluate.generate import generate
from kielo.evaluate.score import evaluate_hugging_face, score
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from tests.evaluate.test_bits_per_byte import VOCAB, byte_tokenizer, contender

TEXTS, TRAINING = ["abc", "öäa"], ["abcab", "öa", "cb"]
SETTINGS = {
    "name": "tiny", "language": "et", "seed": 11,
    "corpus": {"sources": [{"name": "help", "path": "help.txt"}]},
    "evaluate": {"sample_tokens": 6, "temperature": 1.5, "top_k": 9, "ngram_order": 3},
}  # fmt: skip
RECIPE = Recipe.model_validate(SETTINGS)


def flat(tokens_bs: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(*tokens_bs.shape, VOCAB)


@pytest.fixture(autouse=True)
def of_run(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.arange(257)
    plain, chat = ({"id": "1", "source": "help", "text": text, "metadata": {}} for text in ("abca", "b"))
    chat["metadata"]["turns"] = [["user", 1]]
    documents = [plain, plain | {"text": "ö"}]
    sets = [
        (HeldoutSet("help", Path("t"), "heldout.help", ("et", "fi"), 9, None), documents),
        (HeldoutSet("chat", Path("t"), "heldout.chat", (), 9, None), [plain, chat]),
    ]  # fmt: skip
    in_all = {"heldout_documents_in_all": 4, "heldout_bytes_in_all": 17}
    for name, found in (
        ("heldout_documents", lambda folder: ([{"text": text, "metadata": {}} for text in TEXTS], in_all)),
        ("training_texts", lambda recipe, folder: (
            TRAINING, {"training_bytes": 30, "training_bytes_of_byte_baselines": 10})),
        ("training_token_counts", lambda folder, size: counts if size == 257 else None),
        ("load_tokenizer", lambda folder: byte_tokenizer()),
        ("end_of_text_id", lambda tokenizer: 0),
        ("documents_of_sets", lambda folder: sets),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, found)


def test_bits_are_divided_by_bytes_and_borders() -> None:
    """3 and 5 bytes and a border each; every token of a model that knows nothing costs log2(300) bits."""
    scores = score(contender(flat, 7), "step_8", RECIPE, Path("run"))
    tokenizer = byte_tokenizer()
    tokens = [tokenizer.whole.encode(text).ids for text in TEXTS]
    # token t was seen t times, and half a time more, of 257 tokens
    total = 256 * 257 / 2 + 257 / 2
    unigram = -sum(np.log2((token + 0.5) / total) for row in tokens for token in [*row, 0])
    heldout = b"abc\xff\xc3\xb6\xc3\xa4a\xff"
    training = byte_stream(TRAINING)
    assert scores.bits_per_byte.content() == pytest.approx(
        {
            "model": np.log2(300),
            "unigram": unigram / 10,
            "xz": xz_bits(training, heldout) / 10,
            "ngram": ByteNgram(training, 3).bits(heldout) / 10,
        },
        rel=1e-6,
    )
    told = scores.content()
    assert {key: told[key] for key in told if key not in ("bits_per_byte", "samples", "sets")} == {
        "model": "step_8", "sampling": {"temperature": 1.5, "top_k": 9, "seed": 11}, "heldout_bytes": 8,
        "heldout_documents": 2, "heldout_tokens": 10, "sequence_length": 7, "stride": 3,
        "convention": "bits of all tokens, end-of-text included, but without those that the tokenizer puts "
        "before each text, divided by the UTF-8 bytes of the held-out documents plus one byte for each "
        "document; windows of sequence_length tokens advance by stride",
        "heldout_documents_in_all": 4, "heldout_bytes_in_all": 17, "training_bytes": 30,
        "training_bytes_of_byte_baselines": 10, "ngram_order": 3,
    }  # fmt: skip
    assert score(contender(flat, 1), "a", RECIPE, Path("run")).stride == 1


def test_samples_have_seeds_of_their_own() -> None:
    """The recipe's and the next ones, after openings or the recipe's prompts."""
    model = contender(flat, 7)
    asked = RECIPE.evaluate.model_copy(update={"prompts": ("ab", "ab")})
    for recipe, prompts in (
        (RECIPE, ["abc", "öäa", "öäa"]),
        (RECIPE.model_copy(update={"evaluate": asked}), ["ab", "ab"]),
    ):
        samples = score(model, "step_8", recipe, Path("run")).samples
        assert [(one.prompt, one.text) for one in samples] == [
            (prompt, generate(model, prompt, 6, 1.5, 9, seed=11 + number))
            for number, prompt in enumerate(prompts)
        ]


def test_a_set_is_scored_by_its_own_bytes() -> None:
    """4 and 2 bytes and two borders, of 8 tokens; a conversation needs a chat template. What begins each
    document is given, and its bits do not count.
    """
    (found,) = score(contender(flat, 7), "step_8", RECIPE, Path("run")).sets
    assert (found.name, found.languages, found.bytes, found.documents) == ("help", ["et", "fi"], 6, 2)
    assert found.bits_per_byte == pytest.approx(np.log2(300), rel=1e-6)
    with_first = replace(contender(flat, 7), first_ids=(3, 4))
    (found,) = score(with_first, "step_8", RECIPE, Path("run")).sets
    assert found.bits_per_byte == pytest.approx(np.log2(300), rel=1e-6)


def test_damaged_weights_are_told() -> None:
    damaged = contender(lambda tokens_bs, _: torch.nan * flat(tokens_bs, None))
    with pytest.raises(KieloError) as caught:
        score(damaged, "step_8", RECIPE, Path("run"))
    assert str(caught.value) == "test: the model's loss is nan: its weights are damaged, or overflow"


def test_bits_per_byte_are_not_for_an_encoders_text() -> None:
    recipe = Recipe.model_validate(
        SETTINGS | {"train": {"objective": "masked_tokens"}, "model": {"model_type": "ltg_bert"}}
    )
    with pytest.raises(KieloError, match="^hf: the recipe's text is an encoder's, for which bits per byte"):
        evaluate_hugging_face(recipe, Path("run"), Path("hf"))
