"""Learning and forgetting: the scores of a run over its tokens, beside the weights from which it started.

The curves come from the history of `kielo evaluate --watch`, or, without it, from the held-out scores of the
training log. The two are never mixed, because they score different amounts of the text.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import isfinite, sqrt
from typing import NamedTuple

from kielo.artifact.metrics import HeldOutLoss
from kielo.artifact.score_history import ScoredCheckpoint, comparable
from kielo.artifact.scores import MinimalPairScores, PairAccuracy, Scores, TaskScore
from kielo.recipe.amounts import short_amount
from kielo.recipe.cards import Language, language
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.recipe.several_languages import languages_of
from kielo.report.gather import Gathered

# A rise of fewer bits per byte than this is not called forgetting.
NOISE_BITS = 0.01
# The identifier errs by fewer points than this. A lower share of the model's own text is called drift.
NOISE_SHARE = 0.05
MOST_SAMPLED_STEPS = 6
Z_95 = 1.96  # standard errors of the half width of a 95 % interval


@dataclass(frozen=True)
class Curve:
    """A score over the tokens of the run. base: the score of the weights from which the run started."""

    name: str
    languages: tuple[str, ...]
    tokens: list[int]
    values: list[float]
    base: float | None = None
    errors: tuple[float | None, ...] = ()  # standard errors of `values`
    set_name: str = ""  # of the held-out set

    @property
    def change(self) -> float | None:
        """Return the last score less the base model's, or less the first score."""
        if self.base is not None:
            return self.values[-1] - self.base
        return self.values[-1] - self.values[0] if len(self.values) > 1 else None


class History(NamedTuple):
    base: ScoredCheckpoint | None
    rows: list[ScoredCheckpoint]


def history_of(gathered: Gathered) -> History:
    rows = comparable(gathered.history)
    bases = [row for row in rows if row.is_base]
    return History(bases[-1] if bases else None, [row for row in rows if not row.is_base])


def bits_curves(gathered: Gathered) -> list[Curve]:
    """Return bits per byte of each language or held-out set, the run's own language first."""
    base, rows = history_of(gathered)
    scored = [(row.tokens or 0, _bits_of(row.scores, gathered.recipe)) for row in rows if row.scores]
    of_base = _bits_of(base.scores, gathered.recipe) if base and base.scores else {}
    if not scored:
        logged = gathered.training.heldout if gathered.training else []
        scored = [(row.tokens or 0, _logged_bits(row, gathered.recipe)) for row in logged]
        of_base = {}
    sets = {name: languages for _, sets in scored for name, (languages, _) in sets.items()}
    names = _shown_names(sets)
    found = []
    for name, languages in sets.items():
        points = [(tokens, bits[name][1]) for tokens, bits in scored if name in bits]
        points = [(tokens, bits) for tokens, bits in points if isfinite(bits)]
        start = of_base[name][1] if name in of_base else None
        if len(points) + (start is not None) > 1:
            tokens_of, bits_of = [tokens for tokens, _ in points], [bits for _, bits in points]
            found.append(Curve(names[name], languages, tokens_of, bits_of, start, set_name=name))
    own = (gathered.recipe.language,)
    return sorted((curve for curve in found if curve.values), key=lambda curve: curve.languages != own)


class TaskKey(NamedTuple):
    """A task, its metric, and the settings on which its score depends. Scores of one key compare."""

    task: str
    metric: str
    shots: int
    questions: int
    version: str
    seed: int
    chat: bool

    @staticmethod
    def of(score: TaskScore) -> "TaskKey":
        return TaskKey(*(getattr(score, field) for field in TaskKey._fields))

    @property
    def settings(self) -> tuple[str, ...]:
        return (
            f"{self.shots} shots",
            f"{self.questions:,} questions",
            f"version {self.version or 'unknown'}",
            f"seed {self.seed}",
            "chat template" if self.chat else "no chat template",
        )


def task_curves(gathered: Gathered) -> list[Curve]:
    """Return each task's score over the tokens, from the history, and apart from it from the training log.

    Scores in training are in the precision of the training. Scores of other settings have other curves.
    """
    base, rows = history_of(gathered)
    before = {TaskKey.of(one): one.value for one in (base.scores.tasks if base and base.scores else ())}
    scored = ((row.step, row.tokens, row.scores.tasks) for row in rows if row.scores)
    logged = gathered.training.tasks if gathered.training else ()
    in_training = ((row.step, row.tokens, row.task_scores) for row in logged)
    return [*_curves_of(scored, before, ""), *_curves_of(in_training, {}, ", in training")]


def _curves_of(
    rows: Iterable[tuple[int, int | None, Sequence[TaskScore]]], before: Mapping[TaskKey, float], after: str
) -> Iterator[Curve]:
    """Yield the curves of rows (step, tokens, scores). One score without the base model's is no curve."""
    found = defaultdict[TaskKey, dict[int, tuple[int, TaskScore]]](dict)
    for step, tokens, scores in rows:
        for one in scores:
            found[TaskKey.of(one)][step] = tokens or 0, one
    shown = {key: [*of.values()] for key, of in found.items() if len(of) + (key in before) > 1}
    names = score_names(shown)
    for key, points in shown.items():
        yield Curve(
            f"{names[key]}{after}",
            (points[0][1].language,),
            [tokens for tokens, _ in points],
            [of.value for _, of in points],
            before.get(key),
            tuple(of.standard_error for _, of in points),
        )


def score_names(keys: Collection[TaskKey], has_metrics: bool = False) -> dict[TaskKey, str]:
    """Return key → the task, with the metric and settings if the task has several.

    has_metrics: with the metric of every task.
    """
    metrics, settings = defaultdict[str, set[str]](set), defaultdict[tuple[str, str], list[TaskKey]](list)
    for key in keys:
        metrics[key.task].add(key.metric)
        settings[key.task, key.metric].append(key)
    names = {}
    for key in keys:
        is_long = has_metrics or len(metrics[key.task]) > 1
        others = zip(*(one.settings for one in settings[key.task, key.metric]), strict=True)
        own = [mine for mine, every in zip(key.settings, others, strict=True) if len(set(every)) > 1]
        metric = [key.metric.removesuffix(",none")] if is_long else []  # the filter of most metrics
        names[key] = ", ".join([key.task, *metric, *own])
    return names


def masked_curve(gathered: Gathered) -> Curve | None:
    """Return the share of hidden tokens that an encoder predicted, from the history."""
    rows = [row for row in history_of(gathered).rows if row.masked_scores]
    values = [row.masked_scores.accuracy.model for row in rows if row.masked_scores]
    if len(values) < 2:
        return None
    return Curve("Hidden tokens predicted", (), [row.tokens or 0 for row in rows], values)


def answers(gathered: Gathered) -> list[tuple[bool, str]]:
    """Return if the run learns its language and forgets another, as sentences that are good news or bad."""
    found = []
    for curve in bits_curves(gathered):
        if (change := curve.change) is None:
            continue
        than = "the base model" if curve.base is not None else "at the first score"
        more = f"{abs(change):.3f} {'more' if change > 0 else 'fewer'} than {than}"
        bits = f"{curve.values[-1]:.3f} bits per byte, {more}"
        if curve.languages == (gathered.recipe.language,):
            is_good = change < 0
            found.append((is_good, f"It {'learns' if is_good else 'does not learn'} {curve.name}: {bits}."))
        elif curve.base is not None:
            is_good = change < NOISE_BITS
            found.append((is_good, f"It {'keeps' if is_good else 'forgets'} {curve.name}: {bits}."))
    return found + _drift(gathered)


def _drift(gathered: Gathered) -> list[tuple[bool, str]]:
    """Return if the model writes its language, beside the share of held-out text in that language."""
    scores, name = latest_scores(gathered), language_name(gathered.recipe.language)
    if scores is None or (fluency := scores.fluency) is None:
        return []
    codes = _own_codes(gathered.recipe)
    share, heldout = (
        sum(shares.get(code, 0.0) for code in codes)
        for shares in (fluency.languages, fluency.languages_in_heldout or {codes[0]: 1.0})
    )
    is_good = share > heldout - NOISE_SHARE
    what = f"writes {name}" if is_good else "drifts into other languages"
    of = f"{100 * share:.0f} % of its own text is {name}, and {100 * heldout:.0f} % of held-out text"
    return [(is_good, f"It {what}: {of}.")]


def latest_scores(gathered: Gathered) -> Scores | None:
    """Return the scores of the evaluate stage, or the last row of the history."""
    rows = [row.scores for row in history_of(gathered).rows if row.scores]
    return gathered.scores or (rows[-1] if rows else None)


def progress_table(gathered: Gathered) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return (header, rows): each measure of the base model, the first scored checkpoint and the last."""
    base, rows = history_of(gathered)
    curves = bits_curves(gathered)
    if rows:
        columns = {"Base model": base} if base else {}
        columns |= {_at(rows[0]): rows[0], _at(rows[-1]): rows[-1]}
        scores = {name: row.scores for name, row in columns.items() if row and row.scores}
        cells: list[Sequence[str]] = [
            (name, *(value(of) for of in scores.values()))
            for name, value in measures(list(scores.values()), gathered.recipe)
        ]
        return ("", *scores), [row for row in cells if set(row[1:]) != {"–"}]
    if not curves:
        return (), []
    first, last = (f"{short_amount(curves[0].tokens[at])} tokens" for at in (0, -1))
    ends = ((of, of.values[0], of.values[-1]) for of in curves)
    return ("", first, last), [
        (_bits_label(of.name), f"{begin:.3f}", f"{end:.3f}") for of, begin, end in ends
    ]


def samples_over_time(gathered: Gathered) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return prompt → (checkpoint, continuation) of the base model and of at most six evenly spaced rows."""
    base, rows = history_of(gathered)
    if len(rows) < 2 or not rows[-1].scores:
        return []
    most = MOST_SAMPLED_STEPS - 1
    chosen = sorted({round(number * (len(rows) - 1) / most) for number in range(most + 1)})
    shown = ([base] if base else []) + [rows[number] for number in chosen]
    found = []
    for prompt in dict.fromkeys(sample.prompt for sample in rows[-1].scores.samples):
        texts = [
            ("Base model" if row.is_base else _at(row), sample.text)
            for row in shown
            for sample in (row.scores.samples if row.scores else ())
            if sample.prompt == prompt
        ]
        found.append((prompt, texts))
    return found


def pair_error(one: PairAccuracy) -> float:
    """Return the standard error of a share of pairs."""
    if one.standard_error is not None:
        return one.standard_error
    share = pair_share(one)
    return sqrt(share * (1 - share) / one.pairs)


def pair_share(one: PairAccuracy) -> float:
    """Return the share by the whole sentence's likelihood, or for an encoder by hidden tokens."""
    return next((share for share in (one.likelihood, one.token) if share is not None), 0.0)


def pair_rows(pairs: MinimalPairScores, has_terms: bool = False) -> list[tuple[str, ...]]:
    """Return a row for each paradigm: name, pairs, and share with the half width of its 95 % interval.

    has_terms: rows of terms in place of their paradigms, if there are terms.
    """
    groups = pairs.terms if has_terms and pairs.terms else pairs.groups
    return [
        (name, f"{one.pairs:,}", f"{100 * pair_share(one):.1f} ± {100 * Z_95 * pair_error(one):.1f} %")
        for name, one in {**groups, "all": pairs.all}.items()
    ]


def language_name(code: str) -> str:
    return card.name if (card := _card(code)) else code


def _card(code: str) -> Language | None:
    with suppress(KieloError):
        return language(code)
    return None


def _at(row: ScoredCheckpoint) -> str:
    return f"{short_amount(row.tokens)} tokens" if row.tokens else f"step {row.step:,}"


def _bits_label(name: str) -> str:
    return f"Bits per byte, {name}"


Cell = Callable[[Scores], str]


def measures(scores: Sequence[Scores], recipe: Recipe, has_bits: bool = True) -> Iterator[tuple[str, Cell]]:
    """Yield the name of each measure that some of the scores can have, and its cell of one of them."""
    sets = {name: languages for of in scores for name, (languages, _) in _bits_of(of, recipe).items()}
    for name, shown in _shown_names(sets).items() if has_bits else ():
        yield _bits_label(shown), partial(_bits_cell, name=name, recipe=recipe)
    own = _own_codes(recipe)
    yield f"Its own text: share in {language_name(recipe.language)}", partial(_language_cell, codes=own)
    yield "Its own text: repeated words", lambda of: _share_cell(of.fluency.repeated if of.fluency else None)
    yield (
        "Held-out text: repeated words",
        lambda of: _share_cell(of.fluency.repeated_in_heldout if of.fluency else None),
    )
    yield "Minimal pairs, good sentence likelier", lambda of: _pairs_cell(of.minimal_pairs)
    yield "Pairs made by rules, good sentence likelier", lambda of: _pairs_cell(of.made_pairs)
    keys = dict.fromkeys(TaskKey.of(one) for of in scores for one in of.tasks)
    for key, name in score_names(keys, has_metrics=True).items():
        yield name, partial(_task_cell, key=key)


def _own_codes(recipe: Recipe) -> tuple[str, ...]:
    """Return the codes of the recipe's language, also in the corpus' identifier."""
    card = _card(recipe.language)
    of_identifier = card.codes_of(recipe.corpus.language_identifier) if card else ()
    return tuple(dict.fromkeys((recipe.language, *of_identifier)))


def _bits_cell(scores: Scores, name: str, recipe: Recipe) -> str:
    found = _bits_of(scores, recipe).get(name)
    return "–" if found is None else f"{found[1]:.3f}"


def _language_cell(scores: Scores, codes: Sequence[str]) -> str:
    if scores.fluency is None:
        return "–"
    return f"{100 * sum(scores.fluency.languages.get(code, 0.0) for code in codes):.0f} %"


def _share_cell(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _pairs_cell(pairs: MinimalPairScores | None) -> str:
    return "–" if pairs is None else pair_rows(pairs)[-1][-1]


def _task_cell(scores: Scores, key: TaskKey) -> str:
    for one in scores.tasks:
        if TaskKey.of(one) == key:
            error = "" if one.standard_error is None else f" ± {Z_95 * one.standard_error:.3f}"
            return f"{one.value:.3f}{error}"
    return "–"


Bits = dict[str, tuple[tuple[str, ...], float]]  # held-out set → its languages and bits per byte


def _bits_of(scores: Scores | None, recipe: Recipe) -> Bits:
    """Return the bits of each set. The held-out text of a run with one source is that source's."""
    if scores is None:
        return {}
    return _of_only_source(recipe, scores.bits_per_byte.model) | {
        one.name: (tuple(one.languages), one.bits_per_byte) for one in scores.sets
    }


def _logged_bits(row: HeldOutLoss, recipe: Recipe) -> Bits:
    found = {name: (tuple(of.languages), of.bits_per_byte) for name, of in (row.heldout_sets or {}).items()}
    whole = row.heldout_bits_per_byte
    first = {} if whole is None else _of_only_source(recipe, whole)
    return first | {name: (codes, bits) for name, (codes, bits) in found.items() if bits is not None}


def _of_only_source(recipe: Recipe, bits: float) -> Bits:
    sources = recipe.corpus.sources
    return {sources[0].name: (languages_of(recipe, sources[0]), bits)} if len(sources) == 1 else {}


def _shown_names(sets: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return set → the name of its language. Sets of the same language also have their own name."""
    number = Counter(sets.values())
    return {
        name: language_name(codes[0]) if len(codes) == 1 == number[codes] else with_language(name, codes)
        for name, codes in sets.items()
    }


def with_language(set_name: str, codes: Sequence[str]) -> str:
    return f"{language_name(codes[0])} ({set_name})" if len(codes) == 1 else set_name
