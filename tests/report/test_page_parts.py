"""Sentences, tables and markup of the page, one part after the other, from small results made by hand."""

import re
from dataclasses import replace
from typing import Any

import pytest
from markupsafe import escape

from kielo.artifact.metrics import HeldOutLoss, PassedOver, PrecisionChange, PrecisionVerdict
from kielo.artifact.scores import Accuracy, BitsPerByte
from kielo.artifact.stage_counts import RowMap
from kielo.report import write
from kielo.report.gather import Gathered, Training, gather
from tests.report.made_page import ENCODER, NOTHING, section, sections, words
from tests.report.synthetic_run import RECIPE, SOURCE_IN_WORDS, STAGES, source_folder
from tests.report.test_encoder_report import SCORES as MASKED
from tests.report.test_whole_page import Text


@pytest.fixture(autouse=True)
def without_figures(monkeypatch) -> None:
    """Figures take most of a page's time; test_whole_page.py has them on it."""
    monkeypatch.setattr(write.figures, "FIGURES", ())


@pytest.fixture
def gathered(run_folder) -> Gathered:
    return gather(run_folder, RECIPE, STAGES)


def test_sections_of_each_kind_of_run(gathered: Gathered) -> None:
    """An encoder has no certificate, and bits per byte and samples only of a causal use."""
    first, last = ["bits-per-byte", "samples"], ["training", "chronicle", "corpus", "tokenizer"]
    end = ["export", "stages"]
    assert sections(gathered) == [*first, "parity", *last, *end]
    made = RowMap(
        method="mean", old_tokenizer="", old_vocabulary_size=2, rows=[[1]], control_tokens={}, weights={}
    )
    assert sections(replace(gathered, row_map=made)) == [*first, "parity", *last, "transplant", *end]
    encoder = replace(gathered, recipe=ENCODER, masked_scores=MASKED)
    assert sections(encoder) == ["masked-tokens", *first, *last, *end]
    assert sections(replace(encoder, scores=None)) == ["masked-tokens", *last, *end]


def header(found: dict[str, Any]) -> str:
    return re.search(r'<p class="verdict">.*?</p>', write.render_page(found))[0]


def claim(is_good: bool, text: str) -> str:
    kind, mark = ("good", "✓") if is_good else ("bad", "✗")
    return f'<span class="{kind}"><span aria-hidden="true">{mark}</span> {text}</span>'


@pytest.mark.parametrize(
    ("model", "is_good", "beaten"),
    [(1.5, True, "all three baselines"), (1.55, False, "2 of three"), (2.5, False, "0 of three")],
)
def test_a_baseline_is_beaten_by_fewer_bits(gathered, model: float, is_good: bool, beaten: str) -> None:
    """By as many bits it is not."""
    bits = BitsPerByte(model=model, unigram=2.301, xz=1.612, ngram=1.55)
    scores = gathered.scores.model_copy(update={"bits_per_byte": bits})
    said = beaten if is_good else f"{beaten} baselines"
    told = claim(is_good, f"The model beats {said} in held-out bits per byte.")
    parity = claim(True, "Kielo computes the same as Hugging Face transformers.")
    assert header(replace(gathered, scores=scores)) == f'<p class="verdict">{told} {parity}</p>'


@pytest.mark.parametrize(
    ("model", "is_good", "beaten"), [(0.43, True, "all"), (0.42, False, "2"), (0.03, False, "0")]
)
def test_a_baseline_is_beaten_by_more_hidden_tokens(model: float, is_good: bool, beaten: str) -> None:
    accuracy = Accuracy(model=model, unigram=0.04, bigram=0.171, neighbours=0.42)
    found = replace(NOTHING, masked_scores=MASKED.model_copy(update={"accuracy": accuracy}))
    told = claim(is_good, f"The model beats {beaten} of 3 baselines in predicting hidden tokens.")
    assert header(found) == f'<p class="verdict">{told}</p>'


@pytest.mark.parametrize(
    ("passed", "said", "word"), [(True, "computes", "Passed"), (False, "does not compute", "Failed")]
)
def test_the_verdict_of_parity(gathered, passed: bool, said: str, word: str) -> None:
    """On top of the page and in its section, with the colour of good or bad; none without a certificate."""
    parity = gathered.parity.model_copy(update={"passed": passed})
    found = replace(gathered, scores=None, parity=parity)
    told = claim(passed, f"Kielo {said} the same as Hugging Face transformers.")
    assert header(found) == f'<p class="verdict">{told}</p>'
    assert section("parity", found).startswith(
        f'<p><strong class="{"good" if passed else "bad"}">{word}.</strong> Same weights and samples, 20 '
    )
    ranks = parity.model_copy(update={"layout": "tensor 2, in bf16", "weights": "run/step_00000009"})
    both = replace(found, parity=None, parity_on_ranks=ranks)  # of a job alone, and beside one process
    there = claim(passed, f"Kielo in tensor 2, in bf16 {said} the same as Hugging Face transformers.")
    assert header(both) == f'<p class="verdict">{there}</p>'
    both = replace(both, parity=parity)
    assert header(both) == f'<p class="verdict">{told} {there}</p>'
    lines = " ".join(section("parity", both).split())
    assert (
        f"{word} on ranks.</strong> Same weights and samples, 20 optimiser steps in Kielo (tensor 2, in"
        in lines
    )
    found = replace(found, parity=parity.model_copy(update={"source": source_folder(passed)}))
    style = "" if passed else ' class="bad"'
    assert f"<p{style}>{escape(SOURCE_IN_WORDS[passed])}</p>" in section("parity", found)
    assert header(NOTHING) == '<p class="verdict">This run has not been evaluated or verified yet.</p>'


def test_the_figures_below_the_verdict(gathered) -> None:
    def facts(found: dict[str, Any]) -> list[tuple[str, str]]:
        return re.findall(r"<div><dt>([^<]*)</dt><dd>([^<]*)</dd></div>", write.render_page(found))

    found = replace(gathered, masked_scores=MASKED)
    assert facts(found) == [
        ("bits per byte, held-out", "1.413"), ("hidden tokens predicted", "41.5 %"),
        ("parameters", "6.92 million"), ("largest loss difference to HF", "4.0e-07"),
        ("tokens per second", "12,000"), ("clean text", "2.19 MB"),
    ]  # fmt: skip
    assert facts(NOTHING) == [] and "facts" not in write.render_page(NOTHING).partition("<body>")[2]
    training = replace(gathered.training, tokens_per_second=None)
    assert facts(replace(NOTHING, training=training)) == []


def test_a_description_is_shown_where_there_is_one() -> None:
    alone = RECIPE.model_copy(update={"description": ""})
    assert "</h1>\n<p class" in write.render_page(replace(NOTHING, recipe=alone))
    plain = RECIPE.model_copy(update={"description": "a < b"})
    assert "</h1>\n<p>a &lt; b</p>\n<p" in write.render_page(replace(NOTHING, recipe=plain))


def test_what_has_not_run_is_said() -> None:
    stages = {
        "bits-per-byte": "evaluate", "samples": "evaluate", "parity": "verify", "training": "train",
        "corpus": "corpus", "tokenizer": "tokenizer", "export": "export",
    }  # fmt: skip
    for name, stage in stages.items():
        assert section(name, NOTHING) == f'<p class="note">The {stage} stage has not run yet.</p>'
    encoder = replace(NOTHING, recipe=ENCODER)
    assert words("masked-tokens", encoder) == ["The evaluate stage has not run yet."]
    assert words("chronicle", NOTHING) == ["No attempt was recorded."]
    assert words("stages", NOTHING) == ["Stage", "This run", "Time", "Package", "Version", "kielo", "9.8"]


def test_each_half_of_the_corpus_is_needed(gathered) -> None:
    for missing in ("corpus", "funnel"):
        assert words("corpus", replace(gathered, **{missing: None})) == ["The corpus stage has not run yet."]


def test_a_run_without_baselines_has_no_bars(gathered) -> None:
    scores = gathered.scores.model_copy(update={"bits_per_byte": BitsPerByte(model=1.2)})
    found = replace(gathered, scores=scores, parity=None)
    assert words("bits-per-byte", found) == ["The evaluate stage has not run yet."]
    assert header(found) == '<p class="verdict">This run has not been evaluated or verified yet.</p>'


def test_words_of_an_encoder() -> None:
    """Every table and sentence below the title, with numbers of the scores in per cent."""
    assert words("masked-tokens", replace(NOTHING, recipe=ENCODER, masked_scores=MASKED)) == [
        "Hidden tokens predicted", "This model", "41.5 %", "Token unigram", "4.0 %", "Token bigram", "17.1 %",
        "Token bigrams of both neighbours", "42.0 %",
        "3,000 tokens of 300 held-out sequences of 64 were hidden, 15 % of them by subword; the model's loss "
        "is 2.900 nats per hidden token. An encoder predicts some tokens from all others, so that bits per "
        "byte are not defined for this use.",
        "Pseudo bits per byte", "Each token hidden alone", "0.987", "With the later tokens of its word",
        "1.234",
        "2,100 tokens of 9 held-out documents, hidden one after another (Salazar et al. 2020; Kauf and "
        "Ivanova 2023). Pseudo-perplexity of a token: 17.5. The model sees both sides of a token, so these "
        "are less than the bits per byte of a model that writes.",
        "Hidden words", "Sentence with a hidden word", "Truth", "Likeliest tokens",
        "<script>document.body.innerHTML = ''</script> & $x_1$ \"'____ menüü.", "kuva", "| 50 %",
        "Minimal pairs of pairs.tsv", "Pairs", "Good one likelier", "With later tokens of its words",
        "<script>document.body.innerHTML = ''</script> & $x_1$ \"'", "3", "66.7 %", "33.3 %",
        "all", "4", "75.0 %", "50.0 %",
        "Parts of speech", "Logistic regression of frozen states", "93.1 %",
        "The most frequent tag of each word", "87.6 %",
        "1,234 words, after 5,678 with 15 tags; layer 3, of a word of several tokens their mean.",
    ]  # fmt: skip
    bare = MASKED.model_copy(
        update={"pseudo_bits_per_byte": None, "filled_masks": [], "minimal_pairs": None}
        | {"part_of_speech": MASKED.part_of_speech.model_copy(update={"pieces": "first"})}
    )
    found = words("masked-tokens", replace(NOTHING, recipe=ENCODER, masked_scores=bare))
    assert found[10:12] == ["Parts of speech", "Logistic regression of frozen states"]
    assert found[-1].endswith("of a word of several tokens the first token.")
    no_tags = bare.model_copy(update={"part_of_speech": None})
    html = section("masked-tokens", replace(NOTHING, recipe=ENCODER, masked_scores=no_tags))
    assert len(Text(html).lines) == 10
    masks = section("masked-tokens", replace(NOTHING, recipe=ENCODER, masked_scores=MASKED))
    assert '<h3>Hidden words</h3><div lang="no"><div class="scroll" ' in masks
    assert '<td class="text">kuva</td><td class="text">| 50 %</td>' in masks


def test_the_sentence_of_the_training(gathered) -> None:
    """Steps, tokens, speed, share of the peak, and all that was passed over or changed."""
    last = gathered.training.steps[-1]
    passed_over = [
        PassedOver(step=738, passed_over_from=733), PassedOver(step=2100, passed_over_from=1050),
        PassedOver(step=41, passed_over_from=39, passed_over_for="spike"),
    ]  # fmt: skip
    judged = {"gradient_norm_rise": 0.1, "loss_rise": 0.2, "precision_from": 9}
    precisions = [
        PrecisionChange(step=1200, precision="bf16"),
        PrecisionVerdict(step=1300, precision="bf16", outcome="kept", **judged),
        PrecisionVerdict(step=1400, precision="fp8", outcome="taken back", **judged),
    ]
    steps = [last, last.model_copy(update={"step": 1234, "tokens": 5678, "mfu": 0.415, "skipped": 0})]
    training = Training(steps, [], passed_over, precisions, 98765.4)
    assert words("training", replace(NOTHING, training=training))[0] == (
        "1,234 optimiser steps over 5,678 tokens, at 98,765 tokens per second (median), 41.5 % of the "
        "accelerator's peak; steps passed over, as the recipe asks: 733–738, 1,050–2,100; steps passed over, "
        "after spikes of the loss: 39–41; bf16 after step 1,200; the earlier precision again after step "
        "1,400, because the loss or the gradient norm had risen."
    )
    short = last.model_copy(update={"tokens": None, "skipped": 3})
    training = Training([short], [], [], [], None)
    assert words("training", replace(NOTHING, training=training)) == [
        "730 optimiser steps; steps skipped because they were not finite: 3."
    ]
    assert words("training", replace(NOTHING, training=replace(training, steps=[]))) == [
        "The train stage has not run yet."
    ]
    sets = {"a": {"loss": 2.5, "bits_per_byte": None, "languages": ["fi", "sv"]}}
    rows = [
        HeldOutLoss.model_validate({"step": step, "heldout_loss": 3.0, "heldout_sets": found})
        for step, found in ((700, None), (1730, sets))
    ]
    found = section("training", replace(NOTHING, training=replace(training, heldout=rows)))
    assert Text(found).lines[1:] == [
        "Held-out set after step 1,730", "Languages", "Loss", "Bits per byte", "a", "fi, sv", "2.500", "–",
    ]  # fmt: skip
    assert '<td class="text">fi, sv</td><td class="number">2.500</td>' in found
    assert "Held-out set" not in section(
        "training", replace(NOTHING, training=replace(training, heldout=rows[:1]))
    )
