"""The scores of a run's checkpoints beside its training: each new checkpoint once, in a process of its own.

    RUN/watch/history.jsonl     a line for each scored checkpoint (`score_history.py`)
    RUN/watch/lease.*.json      held by the watch, so that a run has one watch
    RUN/watch/ended             written last: a line for each checkpoint that exists and was passed over

The run's own lease stays with the training. A mark keeps the checkpoint that is being scored from being
pruned (`checkpoint_marks.py`). This process needs no torch: a scoring that runs out of memory ends alone.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kielo.artifact.attempt_files import End, append_line, read_attempts
from kielo.artifact.checkpoint_folder import step_folders
from kielo.artifact.checkpoint_marks import kept_from_pruning
from kielo.artifact.lease import Lease
from kielo.artifact.manifest import write_text_atomically
from kielo.artifact.megatron_folder import FORM
from kielo.artifact.score_history import (
    ENDED_NAME,
    WATCH_FOLDER,
    ScoredCheckpoint,
    history_path,
    read_history,
)
from kielo.artifact.weights_folder import weights_here
from kielo.corpus.process_pool import Work, WorkerEnded, WorkerPool
from kielo.evaluate.history_subject import Subject, inputs_of
from kielo.recipe.errors import KieloError, first_line, sentence
from kielo.recipe.sections import Recipe

LOOK_SECONDS = 15.0
Score = Callable[[Recipe, Path, Subject], ScoredCheckpoint]


def score_in_process(
    make: Callable[[Recipe, Path], Work], recipe: Recipe, run_folder: Path, subject: Subject
) -> ScoredCheckpoint:
    """Score by `make`'s function in a new process, which ends with its memory. KieloError, also if killed."""
    with WorkerPool(partial(make, recipe, run_folder), 1, f"the scoring of {subject.name}", {}) as pool:
        try:
            return pool.call(subject)
        except WorkerEnded as problem:
            raise KieloError(
                f"its process ended without scores (exit code {problem.exit_code}); -9 is mostly the kernel, "
                "because memory ran out. Fix: a machine with more memory"
            ) from None


@dataclass
class Watch:
    """The watch of a run. show: called with each row; tell: with each sentence for a person."""

    recipe: Recipe
    run_folder: Path
    show: Callable[[ScoredCheckpoint], None]
    tell: Callable[[str], None]
    score: Score
    look_seconds: float = LOOK_SECONDS
    wait: Callable[[float], None] = field(default_factory=lambda: time.sleep)
    scored: int = 0
    without_task: int = 0  # of those, checkpoints with a task that has no score
    _passed_over: dict[Subject, str] = field(default_factory=dict)  # with the reason
    _said: set[str] = field(default_factory=set)
    # Name and inode of subjects that were scored, or passed over by name.
    _done: set[tuple[str, int]] = field(default_factory=set)
    _unwritten: list[ScoredCheckpoint] = field(default_factory=list)

    def run(self, is_once: bool = False) -> None:
        """Score new checkpoints until the run has finished, or once those that exist."""
        while not is_once and not step_folders(self._checkpoints):
            self._tell_once(f"{self.run_folder}: no checkpoint yet; waiting for the first")
            self.wait(self.look_seconds)
        if not step_folders(self._checkpoints):
            return self.tell(f"{self.run_folder}: no checkpoint yet, so nothing was scored")
        with Lease.take(self.run_folder / WATCH_FOLDER).beating() as lease:
            while True:
                end = _last_end(self.run_folder)  # before the look, so that no later checkpoint is missed
                self.look(lease.check)
                has_finished = end is not None and end.outcome == "finished"
                if (has_finished or is_once) and not self._unwritten:
                    break
                if is_once:
                    raise KieloError(f"{history_path(self.run_folder)}: the scores above were not written")
                if end is not None and not has_finished:
                    self._tell_once(
                        f"training stopped at step {end.step} ({end.outcome}); waiting for its next attempt"
                    )
                self.wait(self.look_seconds)
            lines = "".join(f"{line}\n" for line in self.passed_over)
            write_text_atomically(self.run_folder / WATCH_FOLDER / ENDED_NAME, lines)
        ended = "the run has finished" if has_finished else "looked once"
        lacking = f", {len(self.passed_over)} passed over" if self.passed_over else ""
        self.tell(f"{ended}: {self.scored} scored now{lacking}, in {history_path(self.run_folder)}")

    @property
    def passed_over(self) -> list[str]:
        """Return a line for each checkpoint that was passed over and still exists, with the reason."""
        found = (one for one in self._passed_over.items() if one[0].path.exists())
        return [f"{subject.name}: {reason}" for subject, reason in found]

    def look(self, permit: Callable[[], None] = lambda: None) -> None:
        """Score new checkpoints, oldest first. permit: called before each line is written."""
        self._write(permit)
        if (base := self._base()) is not None:
            self._take(base, permit, (base.name, 0))
        for path in reversed(step_folders(self._checkpoints)):
            try:
                key = path.name, path.stat().st_ino
            except FileNotFoundError:
                self.tell(f"{path.name}: passed over: it was pruned before it could be scored")
                continue
            if key not in self._done:
                with kept_from_pruning(path) as problem:
                    if problem:
                        self._tell_once(
                            f"{path.name}: cannot be kept from pruning ({problem}); it is scored nevertheless"
                        )
                    self._take(Subject(path.name, path), permit, key)

    @property
    def _checkpoints(self) -> Path:
        return self.run_folder / "train" / "checkpoints"

    def _base(self) -> Subject | None:
        """Return the weights that the run started from, if they are here and bits per byte compare."""
        name = self.recipe.model.weights
        if name is None or self.recipe.train.objective == "masked_tokens" or (name, 0) in self._done:
            return None
        if name.startswith(FORM):
            self._tell_once(f"{name}: a checkpoint of Megatron, so the base model is not scored")
            return None
        if (folder := weights_here(name)) is None:
            self._tell_once(f"{name}: not on this machine, so the base model is not scored")
            return None
        return Subject(name, folder, is_base=True)

    def _take(self, subject: Subject, permit: Callable[[], None], key: tuple[str, int]) -> None:
        """Score the subject if it has no scores, and write them. Pass it over by name if that fails."""
        self._done.add(key)
        try:
            inputs = inputs_of(self.recipe, self.run_folder, subject)
            rows = [*read_history(self.run_folder), *self._unwritten]
            # A task without a score is tried again by the next watch.
            if any(row.inputs == inputs and not _lacks_a_task(row) for row in rows):
                return
            row = self.score(self.recipe, self.run_folder, subject)
        except (KieloError, OSError) as error:
            gone = "it vanished while it was read"
            reason = (sentence(error) or first_line(error)) if subject.path.exists() else gone
            self.tell(f"{subject.name}: passed over: {reason}")
            self._passed_over[subject] = reason
            return
        self._passed_over.pop(subject, None)
        self.scored += 1
        self.without_task += _lacks_a_task(row)
        self.show(row)
        self._unwritten.append(row)
        self._write(permit)

    def _write(self, permit: Callable[[], None]) -> None:
        """Write the rows that wait. A full disk is reported once, and the next look tries again."""
        try:
            while self._unwritten:
                permit()
                append_line(history_path(self.run_folder), self._unwritten[0])
                self._unwritten.pop(0)
        except OSError as error:
            self._tell_once(f"scores were not written, and are tried again: {sentence(error)}")

    def _tell_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self.tell(what)


def _lacks_a_task(row: ScoredCheckpoint) -> bool:
    return row.scores is not None and bool(row.scores.unscored_tasks)


def _last_end(run_folder: Path) -> End | None:
    """Return the end of the last attempt; None while an attempt runs."""
    attempts = read_attempts(run_folder / "train")
    return attempts[-1] if attempts and isinstance(attempts[-1], End) else None
