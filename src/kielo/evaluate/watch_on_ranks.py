"""The watch of a run on the ranks of a job: rank 0 looks and writes, and all ranks score in its layout."""

import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from kielo.artifact.attempt_files import now
from kielo.artifact.checkpoint_folder import saved_step
from kielo.artifact.checkpoint_index import read_state
from kielo.artifact.score_history import ScoredCheckpoint
from kielo.artifact.scores import Scores
from kielo.checkpoint.agreement import Agreement
from kielo.evaluate.evaluation import wanted_scores
from kielo.evaluate.history_subject import Subject, inputs_of
from kielo.evaluate.layout_contender import load_checkpoint_on_ranks, load_hugging_face_on_ranks
from kielo.evaluate.log_tasks import log_tasks
from kielo.evaluate.score import place_of_checkpoint, place_of_folder, refuse_tasks, score, with_tasks
from kielo.evaluate.score_on_ranks import placed_for_folder, refuse_encoder, refuse_too_large, world_of
from kielo.evaluate.watch_run import Score
from kielo.ranks import objects
from kielo.ranks.world import World
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.resolve.resolved import Resolved, placed_as_trained
from kielo.train.laid_out_model import LaidOutModel

_SCORE, _WAIT, _END = "score", "wait", "end"


def watch_on_ranks(
    recipe: Recipe, placed: Resolved, run_folder: Path, watch: Callable[[Score, Callable[[float], None]], int]
) -> int:
    """Call `watch` on rank 0 with a function that scores on all ranks, in fp32, and a function that waits.

    All ranks call it. Return the result of `watch`, and 0 on other ranks.
    """
    refuse_encoder(recipe)
    with world_of(placed) as world:
        Agreement().on_first(lambda: refuse_tasks(recipe))
        ranks = _Ranks(recipe, placed, run_folder, world)
        if world.rank:
            ranks.follow()
            return 0
        try:
            return watch(ranks.score, ranks.wait)
        finally:
            if not ranks.is_computing:  # else the others wait inside of a computation, and end with this rank
                ranks.send(_END)


class _Ranks:
    """The ranks and their model, which each checkpoint fills."""

    def __init__(self, recipe: Recipe, placed: Resolved, run_folder: Path, world: World) -> None:
        self._recipe, self._placed, self._run_folder, self._world = recipe, placed, run_folder, world
        self._laid: LaidOutModel | None = None
        self.is_computing = False

    def send(self, kind: str, subject: Subject | None = None) -> None:
        if self._world.size > 1:
            objects.broadcast((kind, subject))

    def wait(self, seconds: float) -> None:
        """Wait on rank 0. The message keeps the others from waiting longer than their limit."""
        self.send(_WAIT)
        time.sleep(seconds)

    def score(self, recipe: Recipe, run_folder: Path, subject: Subject) -> ScoredCheckpoint:
        """Score on all ranks, called on rank 0. Raise KieloError if it failed on all of them."""
        self.is_computing = True
        self.send(_SCORE, subject)
        try:
            found = self._scored(subject)
        except KieloError:
            self.is_computing = False
            raise
        self.is_computing = False
        return found

    def follow(self) -> None:
        while True:
            kind, subject = objects.broadcast(None)
            if kind == _END:
                return
            if kind == _SCORE:
                try:
                    self._scored(subject)
                except KieloError:
                    continue  # rank 0 has it too, and reports it

    def _scored(self, subject: Subject) -> ScoredCheckpoint:
        began, ranks = time.monotonic(), Agreement()
        inputs = ranks.on_first(lambda: inputs_of(self._recipe, self._run_folder, subject))
        with redirect_stdout(sys.stderr):  # on stdout the watch prints rows alone
            scores = self._of_base(subject) if subject.is_base else self._of_checkpoint(subject)
        known: dict[str, Any] = {"step": 0, "tokens": 0, "is_base": True}
        if not subject.is_base:
            tokens = ranks.on_first(lambda: read_state(subject.path).tokens)
            known = {"step": saved_step(subject.path), "tokens": tokens}
        if self._world.rank == 0:
            log_tasks(self._recipe, self._run_folder, known["step"], scores)
        return ScoredCheckpoint(
            model=subject.name,
            inputs=inputs,
            scored_at=now(),
            seconds=round(time.monotonic() - began, 1),
            scores=scores,
            **known,
        )

    def _of_checkpoint(self, subject: Subject) -> Scores:
        ranks, recipe, run_folder = Agreement(), self._recipe, self._run_folder
        resolved = ranks.on_first(lambda: placed_as_trained(self._placed, run_folder))
        wanted = ranks.on_first(lambda: wanted_scores(recipe, run_folder, subject.path))
        if self._laid is None:
            refuse_too_large(resolved, "fp32", bool(recipe.evaluate.tasks))
            self._laid = LaidOutModel.of(resolved, self._world, "fp32")
        place = resolved, run_folder / "tokenizer", self._world
        contender = load_checkpoint_on_ranks(subject.path, *place, "fp32", self._laid)
        scores = score(contender, subject.name, recipe, run_folder, has_baselines=False)
        return with_tasks(scores, contender, recipe, place_of_checkpoint(wanted))

    def _of_base(self, subject: Subject) -> Scores:
        ranks, recipe, run_folder = Agreement(), self._recipe, self._run_folder
        resolved = ranks.on_first(lambda: placed_for_folder(recipe, self._placed, run_folder, subject.path))
        refuse_too_large(resolved, "fp32", bool(recipe.evaluate.tasks))
        contender = load_hugging_face_on_ranks(subject.path, resolved, self._world, "fp32")
        scores = score(contender, subject.name, recipe, run_folder, has_baselines=False)
        place = ranks.on_first(lambda: place_of_folder(run_folder, subject.path))
        return with_tasks(scores, contender, recipe, place)
