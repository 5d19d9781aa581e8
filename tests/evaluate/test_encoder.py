"""What an encoder is shown of a text, which texts go together, and which word of a sentence is hidden."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kielo.dataset.batches import NOT_COUNTED, Batch
from kielo.evaluate import encoder as encoder_module
from kielo.evaluate import masked_tokens
from kielo.evaluate.contender import Contender
from kielo.evaluate.encoder import Encoder, by_length, fill_heldout, fill_prompts
from kielo.evaluate.masked_tokens import score_masked_tokens
from kielo.recipe.errors import KieloError
from kielo.tokenizer.load import TextTokenizer
from kielo.tokenizer.spelling import WordPieces
from tests.evaluate.test_bits_per_byte import byte_tokenizer

CONTROL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["?", "abc", "tere", "maailm", "leht", "vali"]
SIZE = len(CONTROL) + len(WORDS)


def by_place(tokens_bs: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    """Logits whose softmax at place p is 1, 2, … parts of their sum, for tokens from p on, around."""
    places = torch.arange(tokens_bs.shape[1])[:, None]
    parts = 1.0 + (torch.arange(SIZE) - places) % SIZE
    return parts.log().expand(len(tokens_bs), -1, -1)


def words(sequence_length: int) -> Encoder:
    """An encoder of words, whose texts begin with two tokens and end with one."""
    tokenizer = Tokenizer(WordLevel({name: n for n, name in enumerate(CONTROL + WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(CONTROL)
    text_tokenizer = TextTokenizer(tokenizer, Path("in no folder"), "[SEP]")
    return encoder_of(text_tokenizer, sequence_length)


def encoder_of(tokenizer: TextTokenizer, sequence_length: int) -> Encoder:
    contender = Contender("test", by_place, tokenizer, 2, 2, sequence_length, False, torch.device("cpu"))
    none = np.zeros(SIZE, bool)
    return Encoder(contender, 3, (1, 0), (2,), WordPieces(none, none))


def test_a_text_is_between_control_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of 40 tokens are theirs. As many sequences go together as 8,192 tokens are, and 2^26 logits."""
    encoder = words(40)
    assert encoder.most_tokens == 37
    assert encoder.sequence([7, 8]).tolist() == [1, 0, 7, 8, 2] and encoder.sequence([]).dtype == np.int64
    assert [encoder.rows_at_once(length) for length in (100, 8192, 9000)] == [81, 1, 1]
    monkeypatch.setattr(encoder_module, "vocabulary_size", lambda tokenizer: 2**20)
    assert [encoder.rows_at_once(length) for length in (10, 64, 65)] == [6, 1, 1]


@pytest.mark.parametrize(
    ("text", "beginning"),
    [
        ("  tere maa ", "tere maa"),
        ("tere maail", "tere maail"),  # ten bytes fit
        ("tere maailm", "tere"),
        ("tere maailm, tere maailm, tere", "tere"),
        ("abcdefghijklmnop", "abcdefghij"),
        ("õõõõõõõõ", "õõõõõ"),
        ("a õõõõõõõõ", "a"),
        ("", ""),
    ],
)
def test_the_beginning_of_a_text_is_one_sequence(text: str, beginning: str) -> None:
    """Up to the end of a word, where it has spaces; here a token is a byte."""
    assert encoder_of(byte_tokenizer(), 13).beginning(text) == beginning


def test_no_more_than_16_characters_a_token_are_looked_at() -> None:
    assert words(5).beginning(20 * "a" + " " + 20 * "b") == 20 * "a" + " " + 11 * "b"


@pytest.mark.parametrize(
    ("lengths", "rows", "together"),
    [
        ([3, 1, 3, 1, 3], 1, [[1, 3], [0, 2, 4]]),
        ([4096, 4096, 4096], 1, [[0, 1], [2]]),
        ([2731, 2731, 2731], 1, [[0, 1], [2]]),
        ([1000, 1000, 1000, 1000, 1000], 4, [[0, 1], [2, 3], [4]]),
        ([9000, 9000], 1, [[0], [1]]),
        ([], 1, []),
    ],
)
def test_texts_of_one_length_go_together(lengths: list[int], rows: int, together: list[list[int]]) -> None:
    """Up to 8,192 tokens in all, one text at least."""
    assert list(by_length(len(lengths), lengths.__getitem__, lambda _: rows)) == together
    if rows == 1:
        assert list(by_length(len(lengths), lengths.__getitem__)) == together


def likeliest(place: int) -> list[tuple[str, float]]:
    """The five largest parts of `by_place`, and their tokens."""
    names = [*CONTROL, *WORDS]
    return [(names[(place - 1 - rank) % SIZE], (SIZE - rank) / (SIZE * (SIZE + 1) / 2)) for rank in range(5)]


def found_of(filled) -> list[tuple[str, float]]:
    return [(one.text, pytest.approx(one.probability, rel=1e-5)) for one in filled.fillings]


def test_a_hidden_word_is_a_token_of_four_letters() -> None:
    """In a line of 40 to 160 characters; the only one that is fit, wherever it is."""
    line = 9 * "abc " + "tere"
    (filled,) = fill_heldout(words(40), ["abc\n  " + line + " \n" + 39 * "x"], 3)
    assert (filled.before, filled.truth, filled.after) == (9 * "abc ", "tere", "")
    assert found_of(filled) == likeliest(2 + 9)
    (filled,) = fill_heldout(words(43), ["abc leht" + 38 * " abc"], 3)
    assert (filled.before, filled.truth, filled.after) == ("abc ", "leht", 38 * " abc")
    assert len("abc leht" + 38 * " abc") == 160 and found_of(filled) == likeliest(2 + 1)
    # 39 and 161 characters, words of three letters, digits, one token too many
    for document in (
        8 * "abc " + "ab tere", "abc leht " + 38 * " abc", 13 * "abc ", 12 * "abc " + "1234", "",
    ):  # fmt: skip
        assert fill_heldout(words(60), [document], 3) == []
    assert fill_heldout(words(12), [line], 3) == [] != fill_heldout(words(13), [line], 3)


def test_six_documents_have_a_word_hidden() -> None:
    """The seed chooses line and word; documents without a fit line are passed over."""
    lines = [9 * "abc " + word for word in ("tere", "maailm", "leht")]
    documents = ["abc", *(8 * ["\n".join(lines)])]
    filled = fill_heldout(words(40), documents, 3)
    assert len(filled) == 6 and len({one.truth for one in filled}) > 1
    assert filled == fill_heldout(words(40), documents, 3)
    assert [one.truth for one in filled] != [one.truth for one in fill_heldout(words(40), documents, 5)]
    many = [9 * "abc " + "tere maailm leht vali"]
    assert len({fill_heldout(words(40), many, seed)[0].truth for seed in range(9)}) > 1


def test_prompts_have_the_mask_once_and_fit() -> None:
    filled = fill_prompts(words(8), ["tere [MASK] abc leht vali", "[MASK]"])
    assert [(one.before, one.after, one.truth) for one in filled] == [
        ("tere ", " abc leht vali", None), ("", "", None),
    ]  # fmt: skip
    assert [found_of(one) for one in filled] == [likeliest(3), likeliest(2)]
    with pytest.raises(KieloError) as caught:
        fill_prompts(words(7), ["tere [MASK] abc leht vali"])
    assert str(caught.value) == (
        "'tere [MASK] abc leht vali': longer than a sequence of the model. Fix: at most 4 tokens"
    )
    with pytest.raises(KieloError) as caught:
        fill_prompts(words(7), ["[MASK] " + 70 * "x" + " [MASK]"])
    assert str(caught.value) == (
        f"'[MASK] {53 * 'x'}': an encoder fills one hidden word. Fix: [MASK] once in it"
    )


def hidden_batch(rows: int) -> Batch:
    """Sequences of 5 tokens of 12; the label of place 1 or 4 of each, and of place 0 of the last."""
    generator = np.random.default_rng(2)
    inputs = generator.integers(0, 12, (rows, 5))
    labels = np.full((rows, 5), NOT_COUNTED)
    for row in range(rows):
        labels[row, (1, 4)[row % 2]] = generator.integers(0, 3)
    labels[-1, 0] = 2
    return Batch(inputs, labels, np.arange(rows, dtype=np.int32)[:, None].repeat(5, 1), np.arange(rows))


@pytest.mark.parametrize("scale", [2.0, torch.nan])
def test_hidden_tokens_are_scored_beside_baselines(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares and the mean loss by hand, of 35 sequences; of a neighbour that is none the baselines see a
    hidden token, 11.
    """
    batch, asked, seen = hidden_batch(35), [], []
    monkeypatch.setattr(masked_tokens, "masking_vocabulary", lambda folder, kind: SimpleNamespace(mask_id=11))
    monkeypatch.setattr(
        masked_tokens,
        "heldout_sets",
        lambda folder: [SimpleNamespace(batch=lambda *how: asked.append(how) or "text")],
    )
    monkeypatch.setattr(
        masked_tokens,
        "Masking",
        lambda *how: SimpleNamespace(hide=lambda text, rate: asked.append((*how, text, rate)) or batch),
    )
    baselines = SimpleNamespace(
        unigram=1,
        bigram=lambda before: before % 3,
        neighbours=lambda before, after: (before + 2 * after) % 3,
    )
    monkeypatch.setattr(masked_tokens, "TokenBaselines", lambda folder, vocabulary: baselines)

    def logits(tokens_bs: torch.Tensor, documents_bs: torch.Tensor) -> torch.Tensor:
        seen.append((len(tokens_bs), documents_bs[:, 0].tolist()))
        return scale * torch.nn.functional.one_hot(tokens_bs % 3, 12).float()

    identity = SimpleNamespace(
        seed=7,
        phases=[SimpleNamespace(sequence_length=5), SimpleNamespace(sequence_length=9)],
        dataset=SimpleNamespace(mask_documents=True),
        train=SimpleNamespace(masking="span", causal_share=0.25, final_masking_rate=0.15),
    )
    contender = Contender("a", logits, byte_tokenizer(), 0, 0, 5, True, torch.device("cpu"))
    if scale != 2.0:
        with pytest.raises(KieloError, match="^a: the model's loss is nan: its weights are damaged"):
            score_masked_tokens(contender, "step_8", identity, Path("run"))
        return
    scores = score_masked_tokens(contender, "step_8", identity, Path("run"))
    assert [(length, numbers[0]) for length, numbers in seen] == [(16, 0), (16, 16), (3, 32)]
    assert asked[0] == (5, 2048, True)
    assert asked[1][:2] == (7, "span") and asked[1][3:] == (0.25, "text", 0.15)
    right = dict.fromkeys(("model", "unigram", "bigram", "neighbours"), 0)
    nats = 0.0
    places = [(row, place) for row in range(35) for place in range(5) if batch.labels[row, place] >= 0]
    assert len(places) == 36
    for row, place in places:
        label, tokens = batch.labels[row, place], [11, *batch.inputs[row], 11]
        before, token, after = tokens[place : place + 3]
        nats += np.log(np.exp(2) + 11) - 2 * (token % 3 == label)
        right["model"] += token % 3 == label
        right["unigram"] += label == 1
        right["bigram"] += before % 3 == label
        right["neighbours"] += (before + 2 * after) % 3 == label
    assert scores.accuracy.content() == pytest.approx({name: count / 36 for name, count in right.items()})
    assert scores.loss == pytest.approx(nats / 36, rel=1e-6)
    told = scores.model, scores.hidden_tokens, scores.sequences, scores.sequence_length, scores.masking_rate
    assert told == ("step_8", 36, 35, 5, 0.15) and (scores.masking, scores.seed) == ("span", 7)
    batch.labels[:] = NOT_COUNTED
    with pytest.raises(KieloError, match="^run/tokens: the held-out text has no token to hide$"):
        score_masked_tokens(contender, "step_8", identity, Path("run"))
