"""The pages: a run folder → report.html, summary.json and the card in hf/, and run folders → a comparison.

`page.html.jinja` lays the page of a run out within `frame.html.jinja`. A page fetches nothing (a content
security policy forbids it), has no script, and escapes every text. The figures of a section are entries of
`figures.FIGURES`. A stage that has not run gets a sentence instead. `compare.html.jinja` has the curves of
several runs by tokens in one figure, their final scores, size and speed beside each other, and the settings
that differ.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kielo.artifact.durable import (
    disk_problems_reported,
    refuse_other_json,
    refuse_other_text,
    write_own_text,
)
from kielo.artifact.manifest import read_manifest
from kielo.artifact.metrics import HeldOutScore
from kielo.artifact.scores import StageTime, Summary
from kielo.artifact.stage_json import write_json
from kielo.recipe.amounts import format_seconds, short_amount
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.report import compare_progress, corpus_tables, figures, model_card, progress, progress_figures
from kielo.report.gather import Gathered, gather, summarise
from kielo.report.progress_figures import COLOURS, DASHES
from kielo.report.units import fill_template, setting
from kielo.resolve.overview import amount

_NAMES = ("name", "description", "folder")  # of the recipe: the page's head has them

Row = tuple[str, Callable[[Gathered], object]]  # name and value; a dash for none


def write_report(run_folder: Path, recipe: Recipe, stages: dict[str, StageTime] | None = None) -> Path:
    """Write the three files, each whole or not at all, and return the page's path.

    `stages`: times of this run's stages. The report's own seconds are measured here. Raise KieloError for a
    stage's damaged file, and, before anything is written, for a person's file under one of these names. A
    person's model card stays.
    """
    started = time.monotonic()
    run_folder = Path(run_folder)
    path = run_folder / "report.html"
    refuse_other_text(path)
    refuse_other_json(run_folder / Summary.FILE_NAME, "kielo_version")
    earlier = {name: stage for name, stage in (stages or {}).items() if name != "report"}
    try:
        gathered = gather(run_folder, recipe, earlier)
        html = render_page(gathered)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise KieloError(
            f"{run_folder}: a stage's file is not as Kielo writes it ({type(error).__name__}: {error}), so "
            f"no report is possible. Fix: run that stage again with --again"
        ) from error
    with disk_problems_reported(f"{run_folder}: the report"):
        if gathered.export:
            model_card.write_model_card(Path(gathered.export), model_card.render(gathered))
        write_own_text(path, html)
        own = StageTime(seconds=round(time.monotonic() - started, 3), skipped=False)
        write_json(run_folder, summarise(replace(gathered, stages=earlier | {"report": own})))
    return path


def render_page(gathered: Gathered) -> str:
    def drawn(section: str) -> list[tuple[str, str]]:
        every = (*progress_figures.PROGRESS, *figures.FIGURES)
        found = (entry.drawn(gathered) for entry in every if entry.section == section)
        return [of for of in found if of is not None]

    shown = _progress(gathered)
    tables = corpus_tables.corpus_tables(gathered)
    return fill_template("page.html.jinja", **vars(gathered), **shown, **tables, figures=drawn)


def _progress(gathered: Gathered) -> dict[str, Any]:
    header, rows = progress.progress_table(gathered)
    scores = progress.latest_scores(gathered)
    pairs = [of for of in (scores.minimal_pairs, scores.made_pairs) if of] if scores else []
    return {
        "answers": progress.answers(gathered),
        "progress": (header, rows),
        "paradigms": [(of.file, progress.pair_rows(of)) for of in pairs if of.groups],
        "samples_over_time": progress.samples_over_time(gathered),
    }


def write_comparison(runs: Mapping[Path, Recipe], path: Path) -> Path:
    """Write the page of two or more runs, by their folders, and return its path.

    Raise KieloError if the file is not Kielo's own, or if no run has trained or cleaned anything.
    """
    refuse_other_text(path)
    found = [gather(folder, recipe, {}) for folder, recipe in runs.items()]
    if not any(run.funnel or _has_trained(run) for run in found):
        raise KieloError(
            f"{', '.join(map(str, runs))}: nothing was trained and no text cleaned in these runs. "
            "Fix: `kielo run RUN` for each"
        )
    write_own_text(path, render_comparison(found))
    return path


def _has_trained(run: Gathered) -> bool:
    return bool(run.training and run.training.steps)


def render_comparison(runs: Sequence[Gathered]) -> str:
    folders = [Path(run.run_folder) for run in runs]
    names = tuple(folder.resolve().name for folder in folders)
    if len(set(names)) < len(names):
        names = tuple(map(str, folders))
    curves = None
    if any(map(_has_trained, runs)):
        curves = "".join(comparison_curves(runs, names, width) for width in (figures.WIDE, figures.NARROW))
    return fill_template(
        "compare.html.jinja",
        names=names,
        runs=runs,
        notes=_notes(folders),
        curves=curves,
        corpora=corpus_tables.compared_corpora(runs),
        languages=compare_progress.language_panels(runs, names),
        left_out=compare_progress.left_out_languages(runs),
        scores=[*_table(SCORES, runs), *scores_by_text(runs), *compare_progress.progress_rows(runs)],
        speed=_table(SIZE_AND_SPEED, runs),
        settings=differing_settings(runs),
    )


@matplotlib.rc_context(figures.STYLE)
def comparison_curves(runs: Sequence[Gathered], names: Sequence[str], width: float = figures.WIDE) -> str:
    """Draw training loss, held-out loss and held-out bits per byte by tokens, a colour for each run."""
    panels = (
        ("steps", "loss", "training loss\n(nats per token)"),
        ("heldout", "heldout_loss", "held-out loss\n(nats per token)"),
        ("heldout", "heldout_bits_per_byte", "held-out\nbits per byte"),
    )
    alt = ["Curves by tokens."]
    figure = Figure(figsize=(width, 6.6 + 0.25 * len(runs)), layout="constrained")
    every = figure.subplots(len(panels), 1, sharex=True)
    for axes, (rows, key, label) in zip(every, panels, strict=True):
        for number, (run, name) in enumerate(zip(runs, names, strict=True)):
            tokens, values = figures.finite(getattr(run.training, rows, []), key, by="tokens")
            colour = COLOURS[number % len(COLOURS)]
            dashes = DASHES[number // len(COLOURS) % len(DASHES)]
            marker = "o" if rows == "heldout" else ""
            axes.plot(tokens, values, dashes, color=colour, linewidth=1.4, marker=marker, markersize=3.5)
            alt.append(figures.range_of(f"{name}, {label}".replace("\n", " "), values))
        axes.set_ylabel(label)
        figures.page_grid(axes)
    figures.legend_above(every[0], names, columns=1)
    every[-1].set_xlabel("tokens")
    every[-1].xaxis.set_major_locator(MaxNLocator(4 if width <= figures.NARROW else 8))
    every[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_amount(value)))
    return figures.page_svg(figure, "curves", " ".join(alt))


def _last(rows: Iterable[Any], key: str) -> str | None:
    values = [value for row in rows if (value := getattr(row, key)) is not None]
    return f"{values[-1]:.3f}" if values else None


def _median(run: Gathered, key: str, spec: str) -> str | None:
    values = [value for row in run.training.steps if (value := getattr(row, key))] if run.training else []
    return format(median(values), spec) if values else None


def _training_seconds(run: Gathered) -> str | None:
    seconds = {row.name: row.seconds for row in run.stage_rows}["train"]
    return None if seconds is None else format_seconds(seconds)


SCORES: tuple[Row, ...] = (
    ("Held-out bits per byte", lambda run: run.scores and f"{run.scores.bits_per_byte.model:.3f}"),
    (
        "Hidden tokens predicted",
        lambda run: run.masked_scores and f"{100 * run.masked_scores.accuracy.model:.1f} %",
    ),
    ("Last held-out loss", lambda run: run.training and _last(run.training.heldout, "heldout_loss")),
    (
        "Last held-out bits per byte while training",
        lambda run: run.training and _last(run.training.heldout, "heldout_bits_per_byte"),
    ),
    ("Last training loss", lambda run: run.training and _last(run.training.steps, "loss")),
    ("Parity with transformers", lambda run: run.parity and ("passed" if run.parity.passed else "failed")),
)
SIZE_AND_SPEED: tuple[Row, ...] = (
    ("Parameters", lambda run: run.overview and amount(run.overview.parameters)),
    (
        "Tokens trained",
        lambda run: run.training and run.training.steps and short_amount(run.training.steps[-1].tokens or 0),
    ),
    (
        "Tokens per second (median)",
        lambda run: (
            run.training and run.training.tokens_per_second and f"{run.training.tokens_per_second:,.0f}"
        ),
    ),
    ("TFLOP/s of a rank (median)", lambda run: _median(run, "tflops_per_second", ".3g")),
    ("Share of the peak, MFU (median)", lambda run: _median(run, "mfu", ".1%")),
    ("Time of the training stage", _training_seconds),
)


def _table(rows: Sequence[Row], runs: Sequence[Gathered]) -> list[tuple[str, ...]]:
    """Return the rows for which a run has a value, with a dash for runs without it."""
    filled = [(name, [str(value(run) or "–") for run in runs]) for name, value in rows]
    return [(name, *cells) for name, cells in filled if set(cells) != {"–"}]


def scores_by_text(runs: Sequence[Gathered]) -> list[tuple[str, ...]]:
    """Return the last score on each held-out text that several runs share, as a source of one or of many."""
    if not any(_has_sets(run) for run in runs):  # the rows of all held-out text say it
        return []
    of_runs = [_last_sets(run) for run in runs]
    names = dict.fromkeys(name for sets in of_runs for name in sets)
    rows = []
    for name in (name for name in names if sum(name in sets for sets in of_runs) > 1):
        found = [sets.get(name) for sets in of_runs]
        for what, key in (("bits per byte", "bits_per_byte"), ("loss", "loss")):
            values = [None if one is None else getattr(one, key) for one in found]
            if any(value is not None for value in values):
                cells = ("–" if value is None else f"{value:.3f}" for value in values)
                rows.append((f"Last held-out {what} on {name}", *cells))
    return rows


def _has_sets(run: Gathered) -> bool:
    return bool(run.training and run.training.heldout and run.training.heldout[-1].heldout_sets)


def _last_sets(run: Gathered) -> Mapping[str, HeldOutScore]:
    """Return text → its last score. The held-out text of a run with one source is that source's."""
    if not run.training or not run.training.heldout:
        return {}
    last, sources = run.training.heldout[-1], run.recipe.corpus.sources
    if last.heldout_sets is not None or len(sources) > 1:
        return last.heldout_sets or {}
    return {sources[0].name: HeldOutScore(loss=last.heldout_loss, bits_per_byte=last.heldout_bits_per_byte)}


def differing_settings(runs: Sequence[Gathered]) -> list[tuple[str, ...]]:
    """Return (key, value in each run) of recipe keys and package versions with different values."""
    every = [
        {key: value for key, value in _flat(run.recipe.model_dump(mode="json")) if key not in _NAMES}
        | {f"version of {package}": number for package, number in run.versions.items()}
        for run in runs
    ]
    keys = dict.fromkeys(key for settings in every for key in settings)
    rows = [(key, *(setting(settings.get(key)) for settings in every)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(value: Any, key: str = "") -> Iterable[tuple[str, Any]]:
    """Yield (dotted key, value). Tables in a list are named by their `name` or their number from 1."""
    parts: Iterable[tuple[str, Any]] | None = None
    if isinstance(value, dict) and value:
        parts = value.items()
    elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        parts = [(str(entry.get("name") or number), entry) for number, entry in enumerate(value, start=1)]
    if parts is None:
        yield key, value
        return
    for name, part in parts:
        yield from _flat(part, f"{key}.{name}" if key else name)


def _notes(folders: Sequence[Path]) -> list[str]:
    notes = []
    if _differ([folder / "tokenizer" for folder in folders]):
        notes.append("The tokenizers differ: compare bits per byte, not losses per token.")
    if _differ([folder / "corpus" for folder in folders]):
        notes.append("The clean texts differ, and so may the held-out documents: compare scores with care.")
    return notes


def _differ(folders: Sequence[Path]) -> bool:
    manifests = [manifest for folder in folders if (manifest := read_manifest(folder)) is not None]
    files = [{name: file.xxh3_128 for name, file in manifest.files.items()} for manifest in manifests]
    return any(one != files[0] for one in files[1:])
