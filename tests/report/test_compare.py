"""The page that compares runs: its curves, tables and notes, from the files of two runs written by hand."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from kielo.artifact.metrics import HeldOutScore
from kielo.recipe.errors import KieloError
from kielo.report import write
from kielo.report.figures import DROPPED, OURS
from kielo.report.gather import Gathered, gather
from kielo.report.write import comparison_curves, render_comparison, write_comparison
from tests.report import synthetic_run
from tests.report.synthetic_run import RECIPE, STAGES
from tests.report.test_whole_page import Text

CHANGED = RECIPE.model_copy(
    update={"name": "other", "train": RECIPE.train.model_copy(update={"tokens_per_step": 8192})}
)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A run with other scores and four rows of metrics, and with the same text and tokenizer."""
    folder = tmp_path / "other"
    synthetic_run.write_run(folder)
    synthetic_run.evaluate(folder / "evaluate", model=1.25)
    rows = [
        {"step": 1, "tokens": 8192, "loss": 8.5, "tokens_per_second": 900.0, "seconds": 1.0, "mfu": 0.2},
        {"step": 2, "tokens": 16384, "loss": None, "tokens_per_second": 1000.0, "seconds": 2.0, "mfu": 0.4},
        {"step": 3, "tokens": 24576, "loss": 7.5, "tokens_per_second": 1100.0, "seconds": 3.0, "mfu": 0.3},
        {"step": 3, "tokens": 24576, "heldout_loss": 7.75, "heldout_bits_per_byte": 2.5},
    ]
    (folder / "train" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def two(run_folder: Path, other: Path) -> list[Gathered]:
    return [gather(run_folder, RECIPE, STAGES), gather(other, CHANGED, {})]


def test_tables_of_a_comparison(two: list[Gathered], monkeypatch) -> None:
    """A row for what a run has; a dash for a run without it; the settings that differ and no others."""
    monkeypatch.setattr(write, "comparison_curves", lambda *_: "")
    html = render_comparison(two)
    lines = Text(html).lines
    rows = lines[lines.index("Scores") :]
    name = Path(two[0].run_folder).name
    last = json.loads((Path(two[0].run_folder) / "train" / "metrics.jsonl").read_text().splitlines()[-3])
    assert [*rows[:4], *rows[4:7]] == [
        "Scores", "Score", name, "other", "Held-out bits per byte", "1.413", "1.250",
    ]  # fmt: skip
    assert rows[7:19] == [
        "Last held-out loss", rows[8], "7.750",
        "Last held-out bits per byte while training", "–", "2.500",
        "Last training loss", f"{last['loss']:.3f}", "7.500",
        "Parity with transformers", "passed", "passed",
    ]  # fmt: skip
    size = rows[rows.index("Size and speed") :]
    assert size[size.index("Tokens trained") :][:3] == ["Tokens trained", "2.99M", "24.58K"]
    assert size[size.index("Share of the peak, MFU (median)") :][1:3] == ["–", "30.0%"]
    assert rows[rows.index("Settings that differ") :] == [
        "Settings that differ", "Recipe key", name, "other", "train.tokens_per_step", "4096", "8192",
    ]  # fmt: skip
    assert "differ:" not in html and "&lt;script&gt;" in html and "<script" not in html


def test_what_does_not_compare_is_said(two: list[Gathered], monkeypatch) -> None:
    monkeypatch.setattr(write, "comparison_curves", lambda *_: "")
    manifest = Path(two[1].run_folder) / "tokenizer" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"]["measure.json"]["xxh3_128"] = "0" * 32
    manifest.write_text(json.dumps(content))
    notes = re.findall(r'<p class="note">([^<]*)</p>', render_comparison(two))
    assert notes == ["The tokenizers differ: compare bits per byte, not losses per token."]


def test_curves_of_a_comparison(two: list[Gathered], monkeypatch) -> None:
    """Each run in its colour, by tokens; a loss that is not finite is left out."""
    drawn = []
    monkeypatch.setattr(
        write.figures, "page_svg", lambda figure, name, alt: drawn.append((figure, alt)) or ""
    )
    comparison_curves(two, ("a", "b"))
    ((figure, alt),) = drawn
    losses, heldout, bits = (axes.lines for axes in figure.axes)
    assert [line.get_color() for line in losses] == [OURS, DROPPED]
    assert [list(losses[1].get_xdata()), list(losses[1].get_ydata())] == [[8192, 24576], [8.5, 7.5]]
    assert [list(heldout[1].get_xdata()), list(heldout[1].get_ydata())] == [[24576], [7.75]]
    assert [list(bits[1].get_ydata()), list(bits[0].get_ydata())] == [[2.5], []]
    assert list(heldout[0].get_xdata()) == [4096 * step for step in range(100, 800, 100)]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["a", "b"]
    assert figure.axes[-1].get_xlabel() == "tokens"
    assert "b, training loss (nats per token): from 8.500 to 7.500." in alt


def test_two_corpora_without_a_training(two: list[Gathered]) -> None:
    """Text left after each step, and what the identifier said of the dropped text, beside each other."""
    first, second = (dataclasses.replace(run, training=None, chronicle=[]) for run in two)
    source = two[0].funnel.sources or [SimpleNamespace(bytes_in=4_620_000)]
    steps = [step.model_copy(update={"bytes_left": 462_000}) for step in first.funnel.steps]
    changes = {"sources": source, "steps": steps, "identified": {"lines": {"fi": 2000}}}
    other = dataclasses.replace(first, funnel=first.funnel.model_copy(update=changes))
    html = render_comparison([dataclasses.replace(second, funnel=None, corpus=None), other])
    lines = Text(html).lines
    assert "Curves" not in lines
    at = lines.index("Corpora")
    assert lines[at + 4 : at + 7] == ["Text read", "–", "4.62 MB"]
    step = first.funnel.steps[-1].name
    at = lines.index(f"Text left after {step}")
    assert lines[at + 1 : at + 6] == ["–", "10.0%", "Text dropped as fi", "0 B", "2.00 kB"]


def test_what_is_refused(run_folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(KieloError, match="nothing was trained and no text cleaned in these runs"):
        write_comparison({empty: RECIPE, tmp_path: RECIPE}, tmp_path / "page.html")
    own = tmp_path / "own.html"
    own.write_text("mine")
    with pytest.raises(KieloError, match="own.html"):
        write_comparison({run_folder: RECIPE, empty: RECIPE}, own)
    assert own.read_text() == "mine"


def test_a_language_alone_beside_many_on_the_same_text(two: list[Gathered], monkeypatch) -> None:
    """The held-out text of a run with one source is the set of that name in a run with more."""
    monkeypatch.setattr(write, "comparison_curves", lambda *_: "")
    alone, many = two
    assert write.scores_by_text(two) == []  # neither has sets
    name = alone.recipe.corpus.sources[0].name
    sets = {name: HeldOutScore(loss=6.5, bits_per_byte=2.25), "other": HeldOutScore(loss=1.0)}
    last = many.training.heldout[-1].model_copy(update={"heldout_sets": sets})
    many = dataclasses.replace(many, training=dataclasses.replace(many.training, heldout=[last]))
    own = alone.training.heldout[-1].heldout_loss
    lines = Text(render_comparison([alone, many])).lines
    row = lines.index(f"Last held-out loss on {name}")
    assert lines[row + 1 : row + 3] == [f"{own:.3f}", "6.500"]
    assert f"Last held-out bits per byte on {name}" in lines and "Last held-out loss on other" not in lines
