"""Repetition and languages of continuations, by counts of a hand."""

from types import SimpleNamespace

import pytest
import torch

from kielo.evaluate import fluency as module
from kielo.evaluate.fluency import (
    identifier_of,
    language_shares,
    parts_of,
    repeated_share,
    score_continuations,
)
from kielo.evaluate.generate import continuations, generate
from kielo.recipe.sections import Recipe
from tests.evaluate.test_bits_per_byte import VOCAB, bigram, contender

RECIPE = Recipe.model_validate(
    {
        "name": "tiny", "language": "et", "seed": 3,
        "corpus": {"sources": [{"name": "a", "path": "a.txt"}]},
        "train": {"tokens": 1024},
        "evaluate": {"fluency_texts": 2, "sample_tokens": 40, "temperature": 0.0},
    }
)  # fmt: skip


@pytest.mark.parametrize(
    ("beginning", "words", "repeated"),
    [
        ("a b c", "d e f g", 0),
        ("a b c d", "a b c d e", 4),
        ("", "a b c d a b c d a", 5),
        ("x a b c", "d y a b c d", 4),
        ("a b c d a", "b c d", 3),  # the beginning's own words do not count
        ("", "a a a a a", 4),
    ],
)
def test_repeated_words_are_counted(beginning: str, words: str, repeated: int) -> None:
    expected = repeated / len(words.split())
    assert repeated_share([beginning.split()], [words.split()]) == pytest.approx(expected)


def test_a_repetition_is_of_one_text() -> None:
    same = ["a", "b", "c", "d"]
    assert repeated_share([[], []], [same, same]) == 0 and repeated_share([[]], [[]]) == 0


def test_continuations_together_are_those_alone() -> None:
    """Prompts of several lengths, with drawn tokens, that end at different times."""

    def ending(tokens_bs: torch.Tensor, documents_bs: torch.Tensor | None) -> torch.Tensor:
        logits = bigram(tokens_bs, documents_bs)
        logits[..., 0] += 3.0
        return logits

    prompts, model = ["a", "tere tere", "kuidas läheb", ""], contender(ending, 8)
    alone = [generate(model, prompt, 30, 0.9, 20, 5 + n) for n, prompt in enumerate(prompts)]
    assert continuations(model, prompts, 30, 0.9, 20, [5, 6, 7, 8]) == alone
    assert len(set(map(len, alone))) > 1


def test_a_model_that_repeats_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes the last word again and again, however many are continued at once."""
    letters = "abcdefghijklmnopqrstuvwxyz"

    def copying(tokens_bs: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        """A space and two letters come again."""
        return torch.nn.functional.one_hot(tokens_bs.roll(2, 1), VOCAB).float()

    documents = [
        " ".join(one + other for one in letters for other in letters)[: 90 * n] for n in (1, 4, 5, 6)
    ]
    model = contender(copying, 512)
    scores = score_continuations(model, RECIPE, documents)
    assert scores is not None and scores.texts == 2 and scores.repeated_in_heldout == 0
    assert scores.repeated > 0.5 and sum(scores.languages.values()) == pytest.approx(1)
    monkeypatch.setattr(module, "MOST_LOGITS", 1)
    assert score_continuations(model, RECIPE, documents) == scores
    assert score_continuations(model, RECIPE, documents[:1]) is None


def test_languages_are_those_of_parts_of_a_text() -> None:
    """Half Estonian and half English; codes of the identifier become those of cards."""
    estonian = "Klõpsa nupul ja vali menüüst käsk, mis avab selle dokumendi uues aknas. "
    english = "Click the button and choose the command that opens this document in a new window. "
    shares = language_shares(iter([2 * estonian, 3 * english]), identifier_of(RECIPE))
    assert (
        list(shares)[0] == "en" and set(shares) == {"et", "en"} and sum(shares.values()) == pytest.approx(1)
    )
    norwegian = RECIPE.model_copy(update={"language": "nn"})
    text = "Vel ein meny og skriv inn namnet på fila som skal opnast i eit nytt vindauge."
    assert identifier_of(norwegian)(text) == "nn"


def test_an_identifier_of_a_file_has_the_codes_of_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which published models call the languages."""
    known = {"est_Latn": 0.4, "swe_Latn": 0.35, "xx": 0.25}
    theirs = SimpleNamespace(probabilities=lambda text: {text: known[text]})
    monkeypatch.setattr(module, "load_identifier", lambda name: theirs)
    corpus = RECIPE.corpus.model_copy(update={"language_identifier": "models/theirs.bin"})
    identify = identifier_of(RECIPE.model_copy(update={"corpus": corpus}))
    assert [identify(code) for code in known] == ["et", "sv", "xx"]


def test_parts_have_the_text_and_about_a_hundred_characters() -> None:
    text = " ".join(["sõna"] * 200)
    assert " ".join(parts_of(text)) == text
    assert all(50 <= len(part) <= 200 for part in parts_of(text)) and parts_of("") == []
    assert "".join(parts_of(500 * "字")) == 500 * "字" and len(parts_of(500 * "字")) == 4
    assert parts_of("lühike") == ["lühike"]
