"""Page, card and figures of the run that `synthetic_run` writes by hand: each word, and each number drawn.

synthetic_page.txt is the page's text, a line for each piece of it, and synthetic_card.md the card. Their
numbers were checked against the run's files. A page that says something else on purpose changes them.
"""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from kielo import __version__
from kielo.report import figures
from kielo.report.gather import gather
from tests.report.synthetic_run import RECIPE, STAGES

HERE = Path(__file__).parent


class Text(HTMLParser):
    """The pieces of text outside of figures and style sheets."""

    def __init__(self, html: str):
        super().__init__()
        self.lines: list[str] = []
        self._unread = 0
        self.feed(html)

    def handle_starttag(self, tag, attributes) -> None:
        self._unread += tag in ("style", "svg")

    def handle_endtag(self, tag) -> None:
        self._unread -= tag in ("style", "svg")

    def handle_data(self, data) -> None:
        if not self._unread and data.strip():
            self.lines.append(" ".join(data.split()))


def test_the_page_says_this_and_nothing_else(run_folder) -> None:
    """Up to the table of versions, which are those of this machine."""
    found = Text((run_folder / "report.html").read_text(encoding="utf-8")).lines
    expected = (HERE / "synthetic_page.txt").read_text(encoding="utf-8").replace("{folder}", str(run_folder))
    before, versions = found[: (end := found.index("Package"))], found[end:]
    assert before == expected.splitlines()
    assert versions[:3] == ["Package", "Version", "kielo"] and "python" in versions


def test_the_card_says_this_and_nothing_else(run_folder) -> None:
    """But for its last line, the mark."""
    *lines, mark, _ = (run_folder / "hf" / "README.md").read_text(encoding="utf-8").split("\n")
    expected = (HERE / "synthetic_card.md").read_text(encoding="utf-8")
    assert "\n".join(lines) + "\n" == expected.replace("{version}", __version__)
    assert mark.startswith("<!-- written by kielo")


@pytest.fixture
def drawn(monkeypatch) -> dict[str, Figure]:
    """Name → the figure, which is not rendered."""
    found: dict[str, Figure] = {}
    monkeypatch.setattr(figures, "page_svg", lambda figure, name, _: found.setdefault(name, figure) and name)
    return found


def lines_of(axes) -> list[tuple[list, list]]:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]


def texts_of(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def bars_of(axes) -> list[tuple[float, float]]:
    """Returns (left end, width) of each bar, in the order in which they were drawn."""
    return [(bar.get_x(), bar.get_width()) for bar in axes.patches]


def test_curves_of_the_training(run_folder, drawn) -> None:
    """Each finite value at its step, in nats; the last ones are named; speed is drawn from zero."""
    gathered = gather(run_folder, RECIPE, STAGES)
    figures.loss_curves(gathered)
    figures.speed_curve(gathered)
    steps = [1, *range(10, 740, 10)]
    (axes,) = drawn["loss"].axes
    (of_steps, losses), (of_heldout, heldout) = lines_of(axes)
    assert of_steps == steps[:5] + steps[6:] and of_heldout == list(range(100, 800, 100))
    at = dict(zip(of_steps, losses))
    assert heldout == [pytest.approx(at[step] + 0.25) for step in of_heldout]
    assert texts_of(axes) == [f"training {losses[-1]:.3f}", f"held-out {heldout[-1]:.3f}"]
    assert [text.xyann for text in axes.texts] == [(8, -8), (8, 8)]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss (nats per token)")
    (axes,) = drawn["speed"].axes
    ((of_steps, speeds),) = lines_of(axes)
    assert of_steps == steps and speeds[0] == 5000
    assert axes.get_ylim() == (0, pytest.approx(max(speeds) * 1.15))
    assert axes.yaxis.get_major_formatter()(12345.6, 0) == "12,346"
    assert figures.speed_curve(SimpleNamespace(training=SimpleNamespace(tokens_per_second=None))) is None


def test_the_bars_of_the_funnel(run_folder, drawn) -> None:
    """What each step left, and beside it what it dropped; reasons of one step are one bar."""
    gathered = gather(run_folder, RECIPE, STAGES)
    figures.funnel_bars(gathered)
    (axes,) = drawn["funnel"].axes
    left = [4_620_000, 4_608_000, 2_908_000, 2_298_000, 2_208_000, 2_187_000, 2_185_000]
    gone = [0, 12_000, 1_700_000, 610_000, 90_000, 21_000, 2_000]
    assert bars_of(axes) == [*((0, one) for one in left), *zip(left, gone)]
    assert axes.get_xlim() == (0, 4_620_000 * 1.24)
    names = ["normalise", "script", "line language", "duplicate lines", "document language", "length"]
    assert [text.get_text() for text in axes.get_yticklabels()] == [*names, "duplicate documents"]
    assert list(axes.get_yticks()) == [6, 5, 4, 3, 2, 1, 0]
    assert texts_of(axes) == [
        "4.62 MB", "4.61 MB  (−12.0 kB)", "2.91 MB  (−1.70 MB)", "2.30 MB  (−610 kB)", "2.21 MB  (−90.0 kB)",
        "2.19 MB  (−21.0 kB)", "2.19 MB  (−2.00 kB)",
    ]  # fmt: skip
    first = gathered.funnel.steps[1:]
    drawn.clear()
    figures.funnel_bars(replace(gathered, funnel=gathered.funnel.model_copy(update={"steps": first})))
    (axes,) = drawn["funnel"].axes
    assert [text.get_text() for text in axes.get_yticklabels()][:2] == ["as read", "script"]
    assert bars_of(axes)[:2] == [(0, 4_620_000), (0, 4_608_000)]


def test_the_curves_of_parity(drawn) -> None:
    """Both losses, and their difference by theirs; equal ones are left out, and the limit is drawn."""
    losses = SimpleNamespace(ours=[4.0, 3.0, 2.2], theirs=[2.0, 3.0, 2.0], rounding_differences=None)
    parity = SimpleNamespace(parity=SimpleNamespace(losses=losses, tolerance=1e-5))
    figures.parity_curves(parity)
    above, below = drawn["parity"].axes
    assert lines_of(above) == [([1, 2, 3], losses.ours), ([1, 2, 3], losses.theirs)]
    (of_steps, differences), (of_limits, limits) = lines_of(below)
    assert (of_steps, of_limits, limits) == ([1, 3], [1, 2, 3], [1e-5] * 3)
    assert differences == [1.0, pytest.approx(0.1)]
    assert below.get_ylim() == (pytest.approx(1e-8 / 2), pytest.approx(4.0))
    assert below.get_title(loc="left") == "equal to the last bit in 1 of 3 steps"
    assert below.yaxis.get_major_formatter()(0.0012, 0) == "1e-03" and below.get_yscale() == "log"
    assert (above.get_ylabel(), below.get_xlabel(), below.get_ylabel()) == (
        "loss",
        "step",
        "relative difference",
    )
    labels = [text.get_text() for text in above.get_legend().get_texts()]
    assert labels == ["Kielo", "Hugging Face transformers"]
    losses.ours = losses.ours[:2]
    assert figures.parity_curves(parity) is None


def test_the_bars_of_bits_per_byte(run_folder, drawn) -> None:
    """The model and its baselines, from zero, each with its number."""
    figures.bits_per_byte_bars(gather(run_folder, RECIPE, STAGES))
    (axes,) = next(iter(drawn.values())).axes
    values = [1.413, 2.301, 1.612, 1.552]
    assert bars_of(axes) == [(0, value) for value in values] and axes.get_xlim() == (0, 2.301 * 1.12)
    assert texts_of(axes) == [f"{value:.3f}" for value in values]
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "This model", "Token unigram", "xz -9 after the training text", "Interpolated byte 6-gram",
    ]  # fmt: skip
    assert list(axes.get_yticks()) == [3, 2, 1, 0]
