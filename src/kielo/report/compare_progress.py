"""Learning and forgetting of several runs: a panel for each language, and rows of scores."""

from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from kielo.artifact.scores import Scores
from kielo.report import figures
from kielo.report.gather import Gathered
from kielo.report.progress import Curve, bits_curves, latest_scores, measures, with_language
from kielo.report.progress_figures import curves_in_words, draw_curves, name_curves, tokens_axis

MOST_PANELS = 6


def language_panels(runs: Sequence[Gathered], names: Sequence[str]) -> str:
    """Draw bits per byte of each language over tokens, a colour for each run; "" if no run has two scores."""
    panels = _by_language(runs)
    return _panels_svg(panels, names, figures.WIDE) + _panels_svg(panels, names, figures.NARROW)


def left_out_languages(runs: Sequence[Gathered]) -> list[str]:
    """Return the languages that have no panel, because there are too many."""
    return list(_by_language(runs))[MOST_PANELS:]


@matplotlib.rc_context(figures.STYLE)
def _panels_svg(panels: dict[str, list[Curve | None]], names: Sequence[str], width: float) -> str:
    shown = list(panels.items())[:MOST_PANELS]
    if not shown:
        return ""
    figure = Figure(figsize=(width, 2.1 * len(shown) + 0.4), layout="constrained")
    every = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    said = []
    for axes, (language, curves) in zip(every, shown, strict=True):
        found = {number: curve for number, curve in enumerate(curves) if curve is not None}
        draw_curves(axes, found)
        said += [f"{names[number]}: {curves_in_words([curve])}" for number, curve in found.items()]
        axes.set_ylabel(f"{language}\nbits per byte")
        figures.page_grid(axes)
    has_base = any(curve and curve.base is not None for _, curves in shown for curve in curves)
    name_curves(every[0], names, has_base, columns=1 if width <= figures.NARROW else 3)
    tokens_axis(every[-1], width)
    return figures.page_svg(figure, "languages", f"Curves by tokens. {' '.join(said)}")


def _by_language(runs: Sequence[Gathered]) -> dict[str, list[Curve | None]]:
    """Return language → its curve in each run, None without one.

    A set has both names if a run with several sets of its language cannot call it by the language alone.
    """
    every = [bits_curves(run) for run in runs]
    called: dict[str, set[str]] = {}
    for curve in (curve for curves in every for curve in curves):
        called.setdefault(curve.set_name, set()).add(curve.name)

    def name_of(curve: Curve) -> str:
        is_one = len(called[curve.set_name]) == 1
        return curve.name if is_one else with_language(curve.set_name, curve.languages)

    of_runs = [{name_of(curve): curve for curve in curves} for curves in every]
    names = dict.fromkeys(name for curves in of_runs for name in curves)
    return {name: [curves.get(name) for curves in of_runs] for name in names}


def progress_rows(runs: Sequence[Gathered]) -> list[tuple[str, ...]]:
    """Return rows of scores: retention by language against the base model, fluency, pairs and tasks."""
    rows = []
    for language, curves in _by_language(runs).items():
        if not any(curve and curve.base is not None for curve in curves):
            continue
        bases = [of.base if of else None for of in curves]
        lasts = [of.values[-1] if of else None for of in curves]
        changes = [of.change if of and of.base is not None else None for of in curves]
        for what, values, how in (
            ("base model", bases, ".3f"),
            ("last", lasts, ".3f"),
            ("change", changes, "+.3f"),
        ):
            cells = ("–" if value is None else format(value, how) for value in values)
            rows.append((f"Bits per byte, {language}: {what}", *cells))
    scores = [latest_scores(run) for run in runs]
    others: dict[str, list[str]] = {}
    for number, (run, of) in enumerate(zip(runs, scores, strict=True)):
        for name, value in _other_measures(run, of, [one for one in scores if one]):
            others.setdefault(name, ["–"] * len(runs))[number] = value
    return rows + [(name, *cells) for name, cells in others.items() if set(cells) != {"–"}]


def _other_measures(run: Gathered, scores: Scores | None, of_all: Sequence[Scores]) -> list[tuple[str, str]]:
    """Return (name, value) of a run. Scores have their settings in the name if another run has others."""
    if scores is None:
        return []
    found = measures(of_all, run.recipe, has_bits=False)
    return [(name, value(scores)) for name, value in found]
