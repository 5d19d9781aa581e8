"""Likelihood tasks of a recipe while it trains: each is a `Periodic` that asks the model in memory.

The model is asked in the layout and the precision of the run, without compiled layers, because questions have
many lengths. Rank 0 asks, and all ranks compute. Tasks that write text are left to `kielo evaluate`.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from pathlib import Path

from torch import Tensor

from kielo.artifact.metrics import TaskScores
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

SIGN_NAME, SIGN_SECONDS = "asking", 60.0  # in the folder of the training; job.sh looks at its time


@dataclass
class TasksInTraining:
    """The tasks of a recipe with `evaluate.every_steps`, for `kielo.train.run.train`."""

    settings: Evaluate
    resolved: Resolved
    _asked: frozenset[str] = field(default=frozenset(), init=False)
    _folders: str = field(default="", init=False)  # hash of the folders of tasks

    def ready(self) -> None:
        """Load each task once. All ranks call it, and raise KieloError if a task cannot be loaded."""
        asked, self._folders = Agreement().on_first(self._likelihood_tasks)
        self._asked = frozenset(asked)

    def periodic(self) -> "tuple[partial[Periodic], ...]":
        names = (one.name for one in wanted_tasks(self.settings.tasks))
        return tuple(partial(self._made, name) for name in names)

    def _made(
        self, name: str, parts: PrecisionParts, mesh: Mesh, is_stopping: Callable[[], bool]
    ) -> Periodic:
        every = self.settings.every_steps if name in self._asked else 0
        contender = contender_in_training(parts, mesh, self.resolved)
        total_steps = self.resolved.identity.total_steps
        sign = Path(self.resolved.placement.train_folder) / SIGN_NAME
        before_batch = partial(sign_or_stop, sign, is_stopping)
        return TaskInTraining(name, self.settings, contender, every, total_steps, self._folders, before_batch)

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
    before_batch: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        return f"task {self.task}"

    def due(self, step: int) -> bool:
        return self.every_steps > 0 and (step % self.every_steps == 0 or step == self.total_steps)

    def row(self, state: State) -> TaskScores:
        """Score the task. A task that fails has a row without scores, and training continues."""
        found, reason = score_task(self.contender, self.settings, self.task, self.folders, self.before_batch)
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
        raise KieloError("the run was asked to stop")
    with suppress(OSError):  # of a full disk; the job then has the time without a sign
        if not sign.exists() or time.time() - sign.stat().st_mtime >= SIGN_SECONDS:
            sign.touch()


def contender_in_training(parts: PrecisionParts, mesh: Mesh, resolved: Resolved) -> Contender:
    """Return the contender of the model in training, with its current values."""
    laid = LaidOutModel(parts.model, parts.step.forward_backward, mesh)

    def logits(tokens_bs: Tensor, documents_bs: Tensor | None) -> Tensor:
        with uncompiled(parts.model):
            return laid.logits(tokens_bs, documents_bs)

    device = parts.heldout.device
    tokenizer_folder = Path(resolved.placement.tokenizer_folder)
    contender = contender_of_run("the model in training", laid, resolved, tokenizer_folder, device)
    return replace(contender, logits=logits, losses=None)
