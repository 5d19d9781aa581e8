"""`kielo evaluate --watch`: the scores of a run's checkpoints beside its training, a line each."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial

from kielo.artifact.score_history import ScoredCheckpoint
from kielo.artifact.scores import MaskedScores, Scores
from kielo.cli.flags import rank_words
from kielo.cli.terminal import print_text
from kielo.evaluate.evaluation import unscored_in_words
from kielo.evaluate.watch_run import Score
from kielo.ranks.rendezvous import find_rendezvous
from kielo.recipe.amounts import format_seconds, short_amount
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.recipe.sections import Recipe
from kielo.stages import late
from kielo.stages.attempt import on_ranks, placed_here
from kielo.stages.watch_checkpoints import watch_of


def watch(options: argparse.Namespace) -> int:
    """Score the run's checkpoints until it has finished, or once. Ctrl-C ends it, and nothing is lost.

    Return 1 if a task has no score, or a checkpoint that exists was passed over.
    """
    if options.precision is not None:
        raise KieloError("--watch scores in fp32. Fix: leave out --precision")
    if options.recipe is not None:
        raise KieloError(
            f"--watch scores a run's own checkpoints. Fix: kielo evaluate {options.model} --watch"
        )
    recipe = read_recipe(options.model, options.sets).recipe
    flags = ["--watch", *(["--once"] if options.once else [])]

    def on_this_rank() -> int:
        placed = placed_here(recipe, find_rendezvous().size)
        watching = partial(_watch_here, options, recipe)
        return late.watch_on_ranks(recipe, placed, run_folder(recipe), watching)

    words = rank_words(["evaluate", options.model, *flags], options)
    code = on_ranks(words, options.ranks, on_this_rank)
    return _watch_here(options, recipe) if code is None else code


def _watch_here(
    options: argparse.Namespace,
    recipe: Recipe,
    score: Score | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> int:
    said_to = sys.stderr if options.json else sys.stdout
    found = watch_of(
        recipe,
        run_folder(recipe),
        show=_print_json_line if options.json else _print_row,
        tell=lambda text: print_text(text, said_to),
        **({"score": score, "wait": wait} if score else {}),
    )
    try:
        found.run(options.once)
    except KeyboardInterrupt:
        print_text(f"stopped: {found.scored} scored now; the same command continues with the others", said_to)
    return 1 if found.without_task or found.passed_over else 0


def _print_json_line(row: ScoredCheckpoint) -> None:
    print(json.dumps(row.content(), ensure_ascii=False), flush=True)


def _print_row(row: ScoredCheckpoint) -> None:
    parts = [f"base model {row.model}" if row.is_base else f"step {row.step:,}"]
    if row.tokens:
        parts.append(f"{short_amount(row.tokens)} tokens")
    if row.masked_scores:
        parts += _masked_parts(row.masked_scores)
    if row.scores:
        parts += _parts(row.scores)
    print(" · ".join([*parts, format_seconds(row.seconds)]), flush=True)
    for task in row.scores.tasks if row.scores else ():
        error = "" if task.standard_error is None else f" ± {task.standard_error:.3f}"
        chance = "" if task.chance is None else f", chance {task.chance:.3f}"
        print(f"  {task.task} {task.metric} {task.value:.3f}{error}{chance}", flush=True)
    for said in unscored_in_words(row.scores):
        print_text(f"  {said}")


def _masked_parts(scores: MaskedScores) -> list[str]:
    parts = [f"hidden tokens {100 * scores.accuracy.model:.1f} %"]
    if pairs := scores.minimal_pairs:
        parts.append(f"minimal pairs {100 * (pairs.all.token or 0):.1f} %")
    return parts


def _parts(scores: Scores) -> list[str]:
    parts = [f"bits per byte {scores.bits_per_byte.model:.3f}"]
    parts += [f"{one.name} {one.bits_per_byte:.3f}" for one in scores.sets]
    if (pairs := scores.minimal_pairs) and (share := pairs.all.likelihood) is not None:
        parts.append(f"minimal pairs {100 * share:.1f} %")
    if fluency := scores.fluency:
        shares = (f"{code} {100 * share:.0f} %" for code, share in list(fluency.languages.items())[:2])
        parts.append(f"writes {', '.join(shares)}")
    return parts
