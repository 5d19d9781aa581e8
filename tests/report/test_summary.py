"""The table that ends a run, row by row, and the row of one of several languages."""

from typing import Any

import pytest

from kielo.artifact.scores import (
    Accuracy,
    BitsPerByteSummary,
    CorpusSummary,
    ParitySummary,
    StageTime,
    Summary,
)
from kielo.report.make_summary import language_row, summary_rows
from kielo.report.units import format_bytes

NO_CORPUS = CorpusSummary(bytes_in=None, documents_in=None, bytes_kept=None, documents_kept=None)
NO_BITS = BitsPerByteSummary(model=None, unigram=None, xz=None, ngram=None)
NO_PARITY = ParitySummary(max_relative_loss_difference=None, steps=None, passed=None)
ACCURACY = Accuracy(model=0.42, unigram=0.04, bigram=0.43, neighbours=0.42)


def summary(**changes: Any) -> Summary:
    nothing = {
        "stages": {}, "corpus": NO_CORPUS, "bits_per_byte": NO_BITS, "parity": NO_PARITY,
        "tokens_per_second": None, "export": None, "kielo_version": "9.8",
    }  # fmt: skip
    return Summary(**(nothing | changes))


WHOLE = summary(
    stages={
        "corpus": StageTime(seconds=41.0, skipped=True), "train": StageTime(seconds=250.5, skipped=False),
        "export": StageTime(seconds=1.0, skipped=True),
    },
    parameters=1_500_000_000, tokens=23_400_000,
    corpus=CorpusSummary(bytes_in=4_620_000, documents_in=2550, bytes_kept=2_185_000, documents_kept=1905),
    bits_per_byte=BitsPerByteSummary(model=1.5, unigram=2.25, xz=1.5, ngram=1.25),
    parity=ParitySummary(max_relative_loss_difference=4e-7, steps=20, passed=True),
    tokens_per_second=12_345.6, export="runs/x/hf",
)  # fmt: skip


def test_rows_of_a_whole_run() -> None:
    """A baseline with as many bits as the model is not beaten."""
    assert summary_rows(WHOLE) == [
        ("text kept", "2.19 MB of 4.62 MB, 1,905 of 2,550 documents"),
        ("model", "1.50 billion parameters, trained on 23.4 million tokens"),
        ("training speed", "12,346 tokens per second"),
        ("held-out bits per byte", "1.500"),
        ("  token unigram", "2.250  (beaten)"),
        ("  xz -9", "1.500  (not beaten)"),
        ("  byte n-gram", "1.250  (not beaten)"),
        ("parity with Hugging Face", "passed: largest relative loss difference 4.0e-07 over 20 steps"),
        ("exported model", "runs/x/hf"),
        ("time", "4 min 52 s (2 of 3 stages were already done)"),
        ("Kielo", "9.8"),
    ]


def test_rows_of_a_run_that_has_not_begun() -> None:
    baselines = [("  token unigram", "–"), ("  xz -9", "–"), ("  byte n-gram", "–")]
    assert summary_rows(summary()) == [
        ("text kept", "–"), ("training speed", "–"), ("held-out bits per byte", "–"), *baselines,
        ("parity with Hugging Face", "–"), ("exported model", "–"), ("time", "0.0 s"), ("Kielo", "9.8"),
    ]  # fmt: skip
    for only in ({"parameters": 5}, {"tokens": 5}):  # the model's row needs both
        assert len(summary_rows(summary(**only))) == 10
    failed = ParitySummary(max_relative_loss_difference=6e-3, steps=3, passed=False)
    assert ("parity with Hugging Face", "FAILED: largest relative loss difference 6.0e-03 over 3 steps") in (
        summary_rows(summary(parity=failed))
    )
    no_model = BitsPerByteSummary(model=None, unigram=2.0, xz=None, ngram=None)
    assert ("  token unigram", "2.000") in summary_rows(summary(bits_per_byte=no_model))
    no_baseline = BitsPerByteSummary(model=1.2, unigram=None, xz=None, ngram=None)
    assert ("  token unigram", "–") in summary_rows(summary(bits_per_byte=no_baseline))


def test_rows_of_an_encoder() -> None:
    """Hidden tokens in place of bits per byte and parity; both where it was scored as a decoder too."""
    hidden = [
        ("hidden tokens predicted", "42.0 %"), ("  token unigram", "4.0 %  (beaten)"),
        ("  token bigram", "43.0 %  (not beaten)"),
        ("  token bigrams of both neighbours", "42.0 %  (not beaten)"),
    ]  # fmt: skip
    rows = summary_rows(summary(masked_tokens=ACCURACY))
    assert rows == [
        ("text kept", "–"), ("training speed", "–"), *hidden, ("exported model", "–"), ("time", "0.0 s"),
        ("Kielo", "9.8"),
    ]  # fmt: skip
    both = summary_rows(summary(masked_tokens=ACCURACY, bits_per_byte=WHOLE.bits_per_byte))
    assert both[2:7] == [*hidden, ("held-out bits per byte", "1.500")] and len(both) == 13


@pytest.mark.parametrize(
    ("of", "row"),
    [
        (None, ("–", "–", "–")), (summary(), ("–", "–", "0.0 s")),
        (WHOLE, ("2.19 MB", "1.500 bits per byte", "4 min 52 s")),
        (WHOLE.model_copy(update={"masked_tokens": ACCURACY}),
         ("2.19 MB", "42.0 % of hidden tokens", "4 min 52 s")),
    ],
)  # fmt: skip
def test_the_row_of_a_language(of: Summary | None, row: tuple[str, str, str]) -> None:
    assert language_row(of) == row


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (999.4, "999 B"), (1e3, "1.00 kB"), (9_994, "9.99 kB"), (10_000, "10.0 kB"), (99_940, "99.9 kB"),
        (100_000, "100 kB"), (999_000, "999 kB"), (1e6, "1.00 MB"), (1e9, "1.00 GB"), (1e12, "1.00 TB"),
        (2.5e15, "2500 TB"),
    ],
)  # fmt: skip
def test_bytes_at_the_borders_of_units(size: float, text: str) -> None:
    assert format_bytes(size) == text
