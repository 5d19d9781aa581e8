"""The watch of a run's checkpoints, whose scores load torch in a process of their own."""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from kielo.artifact.score_history import ScoredCheckpoint
from kielo.corpus.process_pool import Work
from kielo.evaluate.history_subject import Subject
from kielo.evaluate.watch_run import Watch, score_in_process
from kielo.recipe.errors import KieloError, sentence
from kielo.recipe.sections import Recipe
from kielo.stages import late


def watch_of(
    recipe: Recipe,
    run_folder: Path,
    show: Callable[[ScoredCheckpoint], None],
    tell: Callable[[str], None],
    **how: Any,
) -> Watch:
    """Return the watch of a run. show: called with each row; tell: with each sentence for a person.

    how: `score` and `wait` of a watch on ranks. By default each checkpoint is scored in a new process.
    """
    return Watch(
        recipe, run_folder, show, tell, **{"score": partial(score_in_process, checkpoint_scorer)} | how
    )


def checkpoint_scorer(recipe: Recipe, run_folder: Path) -> Work:
    """Return the function that the new process calls. It raises KieloError with a sentence if possible."""
    score_alone = late.score_alone

    def score(subject: Subject) -> ScoredCheckpoint:
        try:
            with redirect_stdout(sys.stderr):  # on stdout the watch prints rows alone
                return score_alone(recipe, run_folder, subject)
        except Exception as error:
            if (said := sentence(error)) is None:
                raise
            raise KieloError(said) from None

    return score
