"""What page, card and terminal say of an encoder, from scores that are written by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from kielo.artifact.scores import (
    Accuracy,
    FilledMask,
    Filling,
    MaskedScores,
    MinimalPairScores,
    PairAccuracy,
    PartOfSpeechScores,
    PseudoBitsPerByte,
)
from kielo.report import model_card, write
from kielo.report.gather import Gathered, gather, summarise
from kielo.report.make_summary import summary_rows
from tests.report import synthetic_run
from tests.report.synthetic_run import HOSTILE, RECIPE, STAGES
from tests.report.test_report import Page

FILLING = Filling(text="|", probability=0.5)
SCORES = MaskedScores(
    model="step_00000733",
    accuracy=Accuracy(model=0.415, unigram=0.04, bigram=0.171, neighbours=0.42),
    loss=2.9,
    hidden_tokens=3000,
    sequences=300,
    sequence_length=64,
    masking="subword",
    masking_rate=0.15,
    seed=1,
    pseudo_bits_per_byte=PseudoBitsPerByte(
        token=0.987, within_word=1.234, perplexity=17.5, texts=9, tokens=2100, bytes=7000
    ),
    filled_masks=[
        FilledMask(before=HOSTILE, after=" menüü.", truth="kuva", fillings=[FILLING])
    ],
    minimal_pairs=MinimalPairScores(
        file="pairs.tsv",
        all=PairAccuracy(pairs=4, token=0.75, within_word=0.5),
        groups={HOSTILE: PairAccuracy(pairs=3, token=2 / 3, within_word=1 / 3)},
    ),
    part_of_speech=PartOfSpeechScores(
        accuracy=0.931, baseline=0.876, words=1234, training_words=5678, tags=15, layer=3, pieces="mean"
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> Gathered:
    folder: Path = tmp_path_factory.mktemp("run")
    synthetic_run.write_run(folder)
    recipe = RECIPE.model_copy(
        update={"train": RECIPE.train.model_copy(update={"objective": "masked_tokens"})}
    )
    return replace(gather(folder, recipe, STAGES), scores=None, parity=None, masked_scores=SCORES)


def test_the_page_has_every_measure_of_an_encoder(gathered: Gathered) -> None:
    """With their figures, and with text from outside escaped; a baseline that is better is not hidden."""
    text = Page(write.render_page(gathered)).text
    for told in (
        "beats 2 of 3 baselines", "41.5 %", "Token bigram 17.1 %", "both neighbours 42.0 %", "0.987", "1.234",
        "2,100 tokens of 9 held-out documents", "17.5", "kuva", "| 50 %", "Minimal pairs of pairs.tsv",
        "66.7 % 33.3 %", "75.0 % 50.0 %", "93.1 %", "87.6 %",
        "1,234 words, after 5,678 with 15 tags; layer 3",
    ):  # fmt: skip
        assert told in text, told
    assert text.count(HOSTILE) >= 3
    best = SCORES.model_copy(update={"accuracy": Accuracy(model=0.5, unigram=0.04, bigram=0.171)})
    text = Page(write.render_page(replace(gathered, masked_scores=best))).text
    assert "beats all of 2 baselines" in text  # of a file of before, which has two


def test_the_card_says_what_was_measured_and_no_more(gathered: Gathered) -> None:
    card = model_card.render(gathered)
    for told in (
        "| token bigrams of both neighbours | 42.0 % |", "0.987 bits per byte", "1.234", "Of 4 minimal",
        "75.0 %", "93.1 % of 1,234 words", "87.6 %",
    ):  # fmt: skip
        assert told in card, told
    bare = MaskedScores.model_validate_json(
        SCORES.model_dump_json(exclude={"pseudo_bits_per_byte", "minimal_pairs", "part_of_speech"})
    )
    card = model_card.render(replace(gathered, masked_scores=bare))
    assert "41.5 %" in card and "minimal pairs" not in card and "part of speech" not in card


def test_the_terminal_compares_with_each_baseline(gathered: Gathered) -> None:
    rows = dict(summary_rows(summarise(gathered)))
    assert rows["hidden tokens predicted"] == "41.5 %"
    assert rows["  token bigram"] == "17.1 %  (beaten)"
    assert rows["  token bigrams of both neighbours"] == "42.0 %  (not beaten)"
