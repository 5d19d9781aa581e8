"""Learning and forgetting on the page and in the comparison, from histories that are written by hand."""

import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from kielo.artifact.metrics import HeldOutLoss, HeldOutScore, TaskScores
from kielo.artifact.score_history import ScoredCheckpoint, comparable, read_history
from kielo.artifact.scores import (
    Accuracy,
    BitsPerByte,
    FluencyScores,
    MinimalPairScores,
    PairAccuracy,
    Sample,
    Scores,
    SetScore,
    TaskScore,
)
from kielo.recipe.sections import Recipe
from kielo.report import figures, progress_figures, write
from kielo.report.compare_progress import progress_rows
from kielo.report.gather import Gathered, Training
from kielo.report.progress import answers, bits_curves, masked_curve, samples_over_time, task_curves
from tests.report.made_page import ENCODER, NOTHING, section, sections, words
from tests.report.test_encoder_report import SCORES as MASKED

RECIPE = Recipe.model_validate(
    {"name": "continued", "language": "et", "corpus": {"sources": [{"name": "help", "path": "a.txt"}]}}
)
TEXT = {"tokens": "t1", "settings": "s1"}


def scores(estonian: float, english: float, more: dict) -> Scores:
    return Scores(
        model="m",
        bits_per_byte=BitsPerByte(model=estonian),
        sets=[
            SetScore(name="unseen", languages=["en"], bits_per_byte=english, bytes=90, documents=1),
        ],
        samples=[Sample(prompt="Kord", text=f" elas {estonian}")],
        sampling={},
        heldout_bytes=1, heldout_documents=1, heldout_tokens=1, sequence_length=8, stride=4, convention="",
        heldout_documents_in_all=1, training_bytes=0, training_bytes_of_byte_baselines=0, ngram_order=6,
        **more,
    )  # fmt: skip


def row(step: int, estonian: float, english: float, is_base: bool = False, **more) -> ScoredCheckpoint:
    return ScoredCheckpoint(
        step=step, tokens=step * 1000, model=f"step_{step}", is_base=is_base, inputs=TEXT,
        scored_at="2026-11-28T00:00:00+00:00", seconds=1.0, scores=scores(estonian, english, more),
    )  # fmt: skip


def task(value: float) -> list[TaskScore]:
    return [
        TaskScore(task="belebele", metric="acc,none", value=value, standard_error=0.02, questions=900,
                  shots=0, chance=0.25, language="en")
    ]  # fmt: skip


PAIRS = MinimalPairScores(
    file="blimp.zip",
    all=PairAccuracy(pairs=400, likelihood=0.8, standard_error=0.02),
    groups={"agreement": PairAccuracy(pairs=100, likelihood=0.9)},
)


def fluency(share: float) -> FluencyScores:
    return FluencyScores(
        texts=9, repeated=0.125, repeated_in_heldout=0.015, languages={"et": share, "en": 1 - share}
    )


HISTORY = [
    row(0, 3.0, 1.0, is_base=True, tasks=task(0.5), fluency=fluency(0.01)),
    row(100, 2.0, 1.3, tasks=task(0.45), fluency=fluency(0.5)),
    row(200, 1.5, 1.25, tasks=task(0.4), fluency=fluency(0.875), minimal_pairs=PAIRS),
]
CONTINUED = replace(NOTHING, recipe=RECIPE, history=HISTORY)


@pytest.fixture
def without_figures(monkeypatch) -> None:
    monkeypatch.setattr(write.progress_figures, "PROGRESS", ())


def test_the_page_answers_what_is_learned_and_forgotten(without_figures) -> None:
    """Each figure of a row of the history; a 95 % interval is 1.96 standard errors to each side."""
    html = write.render_page(CONTINUED)
    assert re.findall(r'class="(good|bad)"><span aria-hidden="true">.</span> (.*?)</span>', html)[:3] == [
        ("good", "It learns Estonian: 1.500 bits per byte, 1.500 fewer than the base model."),
        ("bad", "It forgets English: 1.250 bits per byte, 0.250 more than the base model."),
        (
            "bad",
            "It drifts into other languages: 88 % of its own text is Estonian, and 100 % of held-out text.",
        ),
    ]
    assert sections(CONTINUED)[0] == "progress"
    said = words("progress", CONTINUED)
    table = said[: said.index("What it writes over time after “Kord”")]
    assert table == [
        "Base model", "100K tokens", "200K tokens",
        "Bits per byte, Estonian", "3.000", "2.000", "1.500",
        "Bits per byte, English", "1.000", "1.300", "1.250",
        "Its own text: share in Estonian", "1 %", "50 %", "88 %",
        "Its own text: repeated words", *["12.5 %"] * 3,
        "Held-out text: repeated words", *["1.5 %"] * 3,
        "Minimal pairs, good sentence likelier", "–", "–", "80.0 ± 3.9 %",
        "belebele, acc", "0.500 ± 0.039", "0.450 ± 0.039", "0.400 ± 0.039",
    ]  # fmt: skip
    assert said[len(table) + 1 :] == [
        "Checkpoint", "Continuation", "Base model", "elas 3.0", "100K tokens", "elas 2.0", "200K tokens",
        "elas 1.5", "Minimal pairs of blimp.zip by paradigm, 1 of them", "Paradigm", "Pairs",
        "Good sentence likelier", "agreement", "100", "90.0 ± 5.9 %", "all", "400", "80.0 ± 3.9 %",
    ]  # fmt: skip


def test_the_share_of_its_own_language_is_by_the_card_and_by_the_identifier(without_figures) -> None:
    """Bokmål is "nb" in newer scores, and "no" by the identifier."""
    shares = fluency(0.5).model_copy(update={"languages": {"nb": 0.5, "no": 0.25, "en": 0.25}})
    recipe = RECIPE.model_copy(update={"language": "nb"})
    found = words("progress", replace(CONTINUED, recipe=recipe, history=[row(1, 2.0, 1.0, fluency=shares)]))
    assert found[found.index("Its own text: share in Norwegian Bokmål") + 1] == "75 %"


@pytest.mark.parametrize(
    ("estonian", "english", "said"),
    [
        (3.1, 1.009, ["It does not learn Estonian: 3.100", "It keeps English: 1.009"]),
        (2.9, 0.9, ["It learns Estonian: 2.900", "It keeps English: 0.900"]),
    ],
)
def test_noise_is_not_called_forgetting(estonian: float, english: float, said: list[str]) -> None:
    found = answers(replace(CONTINUED, history=[HISTORY[0], row(1, estonian, english)]))
    assert [sentence.partition(" bits")[0] for _, sentence in found] == said


def test_tasks_in_training_are_curves_of_their_own() -> None:
    """Beside the curve of the history, which has other precision. One score is no curve."""
    logged = [
        TaskScores(step=step, tokens=1000 * step, scored_task="belebele", task_scores=task(value))
        for step, value in ((50, 0.25), (150, 0.375))
    ]
    training = Training([], [], [], [], None, logged)
    history, own = task_curves(replace(CONTINUED, training=training))
    assert (history.name, history.base, own.name, own.base) == (
        "belebele",
        0.5,
        "belebele, in training",
        None,
    )
    assert (own.tokens, own.values, own.errors) == ([50_000, 150_000], [0.25, 0.375], (0.02, 0.02))
    again = logged[1].model_copy(update={"scored_task": "a group"})  # which has the task too
    (few,) = task(0.9)
    for change in ({"shots": 9}, {"questions": 7}, {"version": "old"}):
        other = logged[0].model_copy(update={"task_scores": [few.model_copy(update=change)], "step": 25})
        mixed = replace(CONTINUED, training=replace(training, tasks=[other, *logged, again]))
        assert task_curves(mixed)[1] == own
    once = replace(CONTINUED, training=replace(training, tasks=logged[:1]))
    assert [curve.name for curve in task_curves(once)] == ["belebele"]


def test_scores_of_other_settings_are_other_curves(without_figures) -> None:
    """With the base model's line for its own settings. Names and cells tell what differs, not more."""
    (few,) = task(0.9)
    more = [
        few.model_copy(update={"shots": 5, "value": 0.7}), few.model_copy(update={"questions": 100}),
        few.model_copy(update={"shots": 5, "seed": 9}), few.model_copy(update={"chat": True}),
    ]  # fmt: skip
    history = [*HISTORY, *(row(step, 1.4, 1.2, tasks=more) for step in (300, 400))]
    found = {curve.name: curve for curve in task_curves(replace(CONTINUED, history=history))}
    assert list(found) == [
        "belebele, 0 shots, 900 questions, seed 1234, no chat template",
        "belebele, 5 shots, 900 questions, seed 1234, no chat template",
        "belebele, 0 shots, 100 questions, seed 1234, no chat template",
        "belebele, 5 shots, 900 questions, seed 9, no chat template",
        "belebele, 0 shots, 900 questions, seed 1234, chat template",
    ]
    first, five, *_ = found.values()
    assert (first.values, first.base, five.values, five.base) == ([0.45, 0.4], 0.5, [0.7, 0.7], None)
    two = [row(400, 1.4, 1.2, tasks=[few]), row(400, 1.4, 1.2, tasks=more[:1])]
    runs = [replace(CONTINUED, history=[HISTORY[0], one]) for one in two]
    assert progress_rows(runs)[-2:] == [
        ("belebele, acc, 0 shots", "0.900 ± 0.039", "–"), ("belebele, acc, 5 shots", "–", "0.700 ± 0.039"),
    ]  # fmt: skip


def test_metrics_of_a_task_have_names_of_their_own_and_room() -> None:
    """A legend of long names has fewer columns: else matplotlib warns that no room is left for the curves."""
    long = "global_piqa_nonparallel_cloze_ekk_latn"
    two = [one.model_copy(update={"task": long}) for one in task(0.4)]
    two.append(two[0].model_copy(update={"metric": "acc_norm,none"}))
    both = replace(CONTINUED, history=[row(step, 2.0, 1.3, tasks=two) for step in (100, 200)])
    assert [curve.name for curve in task_curves(both)] == [f"{long}, acc", f"{long}, acc_norm"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for width in (figures.WIDE, figures.NARROW):
            assert progress_figures.tasks_over_tokens(both, width)
    assert [curve.name for curve in task_curves(CONTINUED)] == ["belebele"]


def test_without_a_history_the_log_answers(without_figures) -> None:
    """The held-out scores of the training; no base model, so nothing is forgotten. One score says nothing."""
    logged = [
        HeldOutLoss(step=step, tokens=step, heldout_loss=1.0, heldout_bits_per_byte=bits,
                    heldout_sets={"unseen": HeldOutScore(loss=1.0, bits_per_byte=2 * bits, languages=["en"])})
        for step, bits in ((1000, 2.5), (2000, 2.25))
    ]  # fmt: skip
    found = replace(CONTINUED, history=[], training=Training([], logged, [], [], None))
    assert answers(found) == [
        (True, "It learns Estonian: 2.250 bits per byte, 0.250 fewer than at the first score.")
    ]
    assert words("progress", found)[:2] == ["1K tokens", "2K tokens"]
    assert words("progress", found)[-3:] == ["Bits per byte, English", "5.000", "4.500"]
    once = replace(found, training=Training([], logged[:1], [], [], None))
    assert answers(once) == [] and "progress" not in sections(replace(once, training=None))


def test_rows_of_other_text_do_not_compare(tmp_path: Path) -> None:
    """The newest text counts, the last row of a step, and a line that is no row is skipped."""
    other = HISTORY[1].model_copy(update={"inputs": TEXT | {"tokens": "t0"}})
    again = row(100, 1.9, 1.0)
    rows = [other, *HISTORY, again]
    assert comparable(rows) == [HISTORY[0], again, HISTORY[2]]
    (tmp_path / "watch").mkdir()
    lines = [row.model_dump_json(exclude_unset=True) for row in rows]
    (tmp_path / "watch" / "history.jsonl").write_text("\n".join([*lines, '{"step": 1}', '{"ste']))
    assert read_history(tmp_path) == rows


def test_samples_over_time_are_spread(without_figures) -> None:
    """The first and the last of eleven, and four between them."""
    history = [row(step, 1.0 + step / 100, 1.0) for step in range(11)]
    ((prompt, texts),) = samples_over_time(replace(CONTINUED, history=history))
    assert prompt == "Kord" and [text for _, text in texts] == [
        f" elas {1.0 + step / 100}" for step in (0, 2, 4, 6, 8, 10)
    ]


def test_an_encoder_has_a_curve_of_hidden_tokens() -> None:
    masked = [
        HISTORY[1].model_copy(
            update={
                "tokens": tokens,
                "scores": None,
                "masked_scores": MASKED.model_copy(
                    update={"accuracy": Accuracy(model=share, unigram=0.1, bigram=0.2)}
                ),
                "step": tokens,
            }
        )
        for tokens, share in ((10, 0.25), (20, 0.5))
    ]
    curve = masked_curve(replace(NOTHING, recipe=ENCODER, history=masked))
    assert curve is not None and (curve.tokens, curve.values) == ([10, 20], [0.25, 0.5])


def two_runs() -> list[Gathered]:
    replayed = [HISTORY[0], row(200, 1.75, 1.0625)]
    return [CONTINUED, replace(CONTINUED, history=replayed)]


def test_runs_of_other_mixtures_beside_each_other() -> None:
    """What replay keeps, as numbers. Curves of one language meet whatever its set is called."""
    assert progress_rows(two_runs()) == [
        ("Bits per byte, Estonian: base model", "3.000", "3.000"),
        ("Bits per byte, Estonian: last", "1.500", "1.750"),
        ("Bits per byte, Estonian: change", "-1.500", "-1.250"),
        ("Bits per byte, English: base model", "1.000", "1.000"),
        ("Bits per byte, English: last", "1.250", "1.062"),
        ("Bits per byte, English: change", "+0.250", "+0.062"),
        ("Its own text: share in Estonian", "88 %", "–"),
        ("Its own text: repeated words", "12.5 %", "–"),
        ("Held-out text: repeated words", "1.5 %", "–"),
        ("Minimal pairs, good sentence likelier", "80.0 ± 3.9 %", "–"),
        ("belebele, acc", "0.400 ± 0.039", "–"),
    ]
    assert progress_rows([replace(NOTHING, recipe=RECIPE)] * 2) == []


def test_two_sets_of_a_language_keep_their_names() -> None:
    """A run with English in its mixture beside a run without: the set that both have meets."""
    added = SetScore(name="english", languages=["en"], bits_per_byte=1.0, bytes=90, documents=1)
    more = [
        row.model_copy(update={"scores": row.scores.model_copy(update={"sets": [*row.scores.sets, added]})})
        for row in HISTORY
    ]
    runs = [CONTINUED, replace(CONTINUED, history=more)]
    names = [curve.name for curve in bits_curves(runs[1])]
    assert names == ["Estonian", "English (unseen)", "English (english)"]
    lasts = [row for row in progress_rows(runs) if row[0].endswith(": last")]
    assert lasts == [
        ("Bits per byte, Estonian: last", "1.500", "1.500"),
        ("Bits per byte, English (unseen): last", "1.250", "1.250"),
        ("Bits per byte, English (english): last", "–", "1.000"),
    ]


def test_the_curves_are_drawn() -> None:
    """The text of figures for screen readers has their numbers."""
    assert [curve.name for curve in bits_curves(CONTINUED)] == ["Estonian", "English"]
    drawn = section("progress", CONTINUED)
    labels = re.findall(r'class="wide" role="img" aria-label="(.*?)"', drawn)
    assert labels == [
        "Curves by tokens. Estonian: from 2.000 to 1.500. The base model has 3.000. English: from 1.300 to "
        "1.250. The base model has 1.000.",
        "Scores with 95 % intervals. belebele: 0.400 ± 0.039; agreement: 0.900 ± 0.059; minimal pairs: 0.800 "
        "± 0.039.",
        "Curves by tokens. belebele: from 0.450 to 0.400. The base model has 0.500.",
    ]
