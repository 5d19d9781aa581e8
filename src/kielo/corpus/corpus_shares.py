"""The work on a corpus beside other machines that see the same disk: shares of its tasks, and their progress.

Nothing but the work folder says who does what. A machine first does the tasks of its own share, and then
tasks that nobody has begun. So jobs may start late, end early or never come: the others do their tasks.
"""

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kielo.artifact.manifest import is_current, read_manifest
from kielo.artifact.this_place import is_alive, this_place
from kielo.corpus.corpus_stage import KIND, VERSION, plan_corpus
from kielo.corpus.corpus_tasks import PLAN, CorpusTasks, corpus_worker, tasks_folder
from kielo.corpus.process_pool import WorkerPool
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe

POLL_SECONDS = 1.0
# A begun task of another machine is done again after this many times the longest task here.
PATIENCE, LEAST_PATIENCE_SECONDS = 5, 60.0


class CorpusProgress(NamedTuple):
    finished: int  # tasks
    parts: int  # tasks of the rounds whose number is known
    is_joined: bool  # the stage is finished
    rounds: dict[str, tuple[int, int]]  # name → finished tasks and all


def run_corpus_share(
    recipe: Recipe, folder: Path, raw_folder: Path, share: tuple[int, int], progress: bool = True
) -> int:
    """Do tasks of the corpus, first from the k-th of n shares, until all are done by somebody.

    Return the number of tasks done here. `run_corpus` then only puts the stage together.
    """
    refuse_engine(recipe)
    planned = plan_corpus(recipe, folder, raw_folder, progress)
    if planned is None:
        return 0
    tasks, inputs, section = planned
    done = work_off(tasks, share)
    if not is_current(folder, KIND, VERSION, inputs, section):
        tasks.refuse_removed()
    return done


def refuse_engine(recipe: Recipe) -> None:
    """Raise KieloError if the recipe's engine gives all tasks to machines, so that there are no shares."""
    if recipe.corpus.engine != "processes":
        raise KieloError(
            f'corpus.engine = "{recipe.corpus.engine}" has no shares: it has all tasks. Fix: --set '
            "corpus.engine=processes"
        )


def work_off(tasks: CorpusTasks, share: tuple[int, int], poll_seconds: float = POLL_SECONDS) -> int:
    """Do the tasks of a share, and then undone tasks of the others. Return the number done here.

    End also when the work folder is removed: another machine put the corpus together.
    """
    workers, done = tasks.recipe.corpus.workers, 0
    begun = _BegunTasks(tasks)
    try:
        with WorkerPool(partial(corpus_worker, tasks.recipe, tasks.work), workers, "corpus") as pool:
            for round in tasks.rounds:
                for numbers in _turns(tasks, round, share, begun):
                    if not numbers:
                        time.sleep(poll_seconds)
                        continue
                    started = time.monotonic()
                    for _ in pool.results([(round, number) for number in numbers]):
                        done += 1
                    begun.note((time.monotonic() - started) * min(workers, len(numbers)) / len(numbers))
    except (KieloError, OSError):
        if tasks.is_planned():
            raise
    return done


def _turns(
    tasks: CorpusTasks, round: str, share: tuple[int, int], begun: "_BegunTasks"
) -> Iterator[list[int]]:
    """Yield the tasks to do next, until the round is finished. An empty list: others are at all of them."""
    k, n = share
    if own := [number for number in tasks.undone(round) if number % n == k - 1]:
        yield own
    while undone := tasks.undone(round):
        elsewhere = begun.elsewhere(round)
        free = [number for number in undone if number not in elsewhere]
        # Several machines that are left begin at different tasks, and look again after a few.
        first = len(free) * (k - 1) // n
        yield (free[first:] + free[:first])[: tasks.recipe.corpus.workers]


class _BegunTasks:
    """The tasks that live workers of any machine are at. Clocks of machines are not compared."""

    def __init__(self, tasks: CorpusTasks):
        self._work, self._longest = tasks.work, 0.0
        self._seen: dict[str, float] = {}  # folder of a begun task → when this machine first saw it

    def note(self, seconds: float) -> None:
        self._longest = max(self._longest, seconds)

    def elsewhere(self, round: str) -> set[int]:
        patience, now = max(PATIENCE * self._longest, LEAST_PATIENCE_SECONDS), time.monotonic()
        found, folder = set(), self._work / round
        for name in os.listdir(folder) if folder.is_dir() else ():
            number, _, worker = name.removeprefix(".").partition(".")
            if not worker:
                continue
            place, _, process = worker.rpartition(".")
            seen = self._seen.setdefault(f"{round}/{name}", now)
            is_dead = place == this_place() and not is_alive(process)
            if not is_dead and now - seen < patience:
                found.add(int(number))
        return found


def corpus_progress(recipe: Recipe, folder: Path) -> CorpusProgress:
    """Return how far the newest work on the corpus in `folder` is."""
    plans = sorted(tasks_folder(folder).glob(f"[!.]*/{PLAN}"), key=lambda path: path.stat().st_mtime)
    if not plans:
        return CorpusProgress(0, 0, read_manifest(folder) is not None, {})
    tasks, rounds = CorpusTasks(recipe, plans[-1].parent), dict[str, tuple[int, int]]()
    for round in tasks.rounds:
        try:
            number = tasks.num_tasks(round)
        except KieloError:  # a round before it says the number
            break
        rounds[round] = (number - len(tasks.undone(round)), number)
    finished, known = (sum(numbers) for numbers in zip(*rounds.values(), strict=True))
    return CorpusProgress(finished, known, False, rounds)
