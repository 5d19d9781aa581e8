"""Likelihood tasks of a recipe while it trains: each is a `Periodic` that asks the model in memory.

The model is asked in the layout and the precision of the run, without compiled layers, because questions have
many lengths. Rank 0 asks, and all ranks compute. Tasks that write text are left to `kielo evaluate`.

A stop of any rank ends a task after the batch of questions at work, without scores. The next attempt asks the
tasks of that step first, of the checkpoint that the stop has saved.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from pathlib import Path

from torch import Tensor

from kielo.artifact.metrics import METRICS_NAME, TaskScores, of_kind, read_metrics
from kielo.checkpoint.agreement import Agreement
from kielo.evaluate.contender import Contender
from kielo.evaluate.layout_contender import contender_of_run
from kielo.evaluate.tasks import score_task
from kielo.evaluate.tasks_data import harness_surroundings
from kielo.evaluate.tasks_harness import Harness, NotScored
from kielo.evaluate.tasks_wanted import wanted_tasks
from kielo.parallel.compile import uncompiled
from kielo.parallel.mesh import Mesh
from kielo.recipe.errors import KieloError, print_text
from kielo.recipe.sections import Evaluate
from kielo.resolve.resolved import Resolved
from kielo.train.laid_out_model import LaidOutModel
from kielo.train.parts import Periodic, PrecisionParts
from kielo.train.state import State
from kielo.train.stop import Stop

SIGN_NAME, SIGN_SECONDS = "asking", 60.0  # in the folder of the training; job.sh looks at its time
STOPPED = "the run was asked to stop"


@dataclass
class TasksInTraining:
    """The tasks of a recipe with `evaluate.every_steps`, for `kielo.train.run.train`."""

    settings: Evaluate
    resolved: Resolved
    _asked: frozenset[str] = field(default=frozenset(), init=False)
    _folders: str = field(default="", init=False)  # hash of the folders of tasks
    _owed: dict[str, int] = field(default_factory=dict, init=False)  # task → step of which a stop has kept it

    def ready(self) -> None:
        """Load each task once. All ranks call it, and raise KieloError if a task cannot be loaded."""
        asked, self._folders = Agreement().on_first(self._likelihood_tasks)
        self._asked = frozenset(asked)
        self._owed = Agreement().on_first(self._stopped)

    def periodic(self) -> "tuple[partial[Periodic], ...]":
        names = (one.name for one in wanted_tasks(self.settings.tasks))
        return tuple(partial(self._made, name) for name in names)

    def _made(self, name: str, parts: PrecisionParts, mesh: Mesh, stop: Stop) -> Periodic:
        contender = contender_in_training(parts, mesh, self.resolved, stop.settle)
        sign = Path(self.resolved.placement.train_folder) / SIGN_NAME
        return TaskInTraining(
            name,
            self.settings,
            contender,
            every_steps=self.settings.every_steps if name in self._asked else 0,
            total_steps=self.resolved.identity.total_steps,
            folders=self._folders,
            before_batch=partial(sign_or_stop, sign, stop.look),
            after_task=stop.settle,
            owed_step=self._owed.get(name),
        )

    def _stopped(self) -> dict[str, int]:
        """Return task → the step of its last row, if a stop has ended it."""
        rows = read_metrics(Path(self.resolved.placement.train_folder) / METRICS_NAME)
        last = {row.scored_task: row for row in of_kind(rows, TaskScores)}
        return {name: row.step for name, row in last.items() if row.unscored == STOPPED}

    def _likelihood_tasks(self) -> tuple[list[str], str]:
        """Return the names of tasks that compare likelihoods, and the hash of all folders, on rank 0."""
        asked: list[str] = []
        written: list[str] = []
        failed: list[str] = []
        with harness_surroundings():
            harness = Harness(self.settings)
            for wanted in harness.wanted:
                try:
                    tasks = harness.load(wanted).tasks.values()
                except NotScored as problem:
                    failed.append(f"{wanted.name}: {problem}")
                    continue
                if any(not len(task.eval_docs) for task in tasks):
                    failed.append(f"{wanted.name}: its set of questions is empty")
                is_written = any(task.OUTPUT_TYPE == "generate_until" for task in tasks)
                (written if is_written else asked).append(wanted.name)
        if failed:
            raise KieloError(f"evaluate.every_steps: no score of {'; '.join(failed)}")
        if not asked:
            raise KieloError(
                f"evaluate.every_steps: the model has to write text in each task ({', '.join(written)}), and "
                "training asks for likelihoods alone. Fix: evaluate.every_steps = 0"
            )
        if written:
            print_text(
                f"tasks in which the model writes text are scored by kielo evaluate alone: "
                f"{', '.join(written)}"
            )
        return asked, harness.hash_of_folders


@dataclass(frozen=True)
class TaskInTraining:
    """A `Periodic` that scores a task, or each task of a group."""

    task: str
    settings: Evaluate
    contender: Contender
    every_steps: int  # 0: never
    total_steps: int
    folders: str = ""  # hash of the folders of tasks before the training
    before_batch: Callable[[], None] = lambda: None  # on rank 0
    after_task: Callable[[], object] = lambda: None  # on all ranks
    owed_step: int | None = None

    @property
    def name(self) -> str:
        return f"task {self.task}"

    def due(self, step: int) -> bool:
        return self.every_steps > 0 and (step % self.every_steps == 0 or step == self.total_steps)

    def is_owed(self, step: int) -> bool:
        return self.owed_step == step

    def row(self, state: State) -> TaskScores:
        """Score the task. A task that fails has a row without scores, and training continues."""
        found, reason = score_task(self.contender, self.settings, self.task, self.folders, self.before_batch)
        self.after_task()
        finite = [one for one in found if isfinite(one.value)]
        if odd := [f"{one.task} {one.metric} is {one.value}" for one in found if one not in finite]:
            reason = ", ".join(odd)
        finite = [
            one.model_copy(update={"standard_error": None}) if not isfinite(one.standard_error or 0) else one
            for one in finite
        ]
        row = TaskScores(step=state.step, tokens=state.tokens, scored_task=self.task, task_scores=finite)
        return row.model_copy(update={"unscored": reason}) if reason else row


def sign_or_stop(sign: Path, is_stopping: Callable[[], bool]) -> None:
    """Touch `sign` once a minute, for job.sh. Raise KieloError if the run was asked to stop.

    The job's last minutes are for the save, and a task can take longer.
    """
    if is_stopping():
        raise KieloError(STOPPED)
    with suppress(OSError):  # of a full disk; the job then has the time without a sign
        if not sign.exists() or time.time() - sign.stat().st_mtime >= SIGN_SECONDS:
            sign.touch()


def contender_in_training(
    parts: PrecisionParts, mesh: Mesh, resolved: Resolved, after_batch: Callable[[], object]
) -> Contender:
    """Return the contender of the model in training, with its values. All ranks call `after_batch`."""
    laid = LaidOutModel(parts.model, parts.step.forward_backward, mesh)

    def logits(tokens_bs: Tensor, documents_bs: Tensor | None) -> Tensor:
        with uncompiled(parts.model):
            logits_bsv = laid.logits(tokens_bs, documents_bs)
        after_batch()
        return logits_bsv

    device = parts.heldout.device
    tokenizer_folder = Path(resolved.placement.tokenizer_folder)
    contender = contender_of_run("the model in training", laid, resolved, tokenizer_folder, device)
    return replace(contender, logits=logits, losses=None)
