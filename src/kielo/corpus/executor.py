"""datatrove's local executor, made fit to be called from anywhere: a console script, a test, a notebook.

Steps and a number of workers -> what each step counted, summed over the workers.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.utils.stats import PipelineStats
from loguru import logger

from kielo.corpus.steps import CorpusStep

# One thread for each worker: several pools of threads on the same cores only get in each other's way.
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class QuietExecutor(LocalPipelineExecutor):
    """Workers tell the funnel, not the terminal: their log lines are datatrove's, about tasks and ranks."""

    def _run_for_rank(self, *arguments, **keywords) -> PipelineStats:
        logger.disable("datatrove")
        return super()._run_for_rank(*arguments, **keywords)


def run_pipeline(steps: Sequence[CorpusStep], workers: int, logging_folder: Path) -> list[dict[str, int]]:
    """Run the steps over all ranks; returns for each step its counts by label.

    With one worker everything happens in this process. An exception of a worker is raised here.
    """
    executor = QuietExecutor(
        list(steps), tasks=workers, workers=workers, logging_dir=str(logging_folder), skip_completed=False
    )
    logger.disable("datatrove")
    try:
        with _environment(WORKER_ENVIRONMENT), _without_main_file():
            statistics = executor.run()
    finally:
        logger.enable("datatrove")
    return [{label: int(metric.total) for label, metric in stats.stats.items()} for stats in statistics.stats]


@contextmanager
def _without_main_file() -> Iterator[None]:
    """Keep the workers from importing the caller's main file again.

    A fork server does so to find what was defined there. Nothing of ours is, and a script without
    `if __name__ == "__main__"` would start itself anew in each worker.
    """
    main = sys.modules["__main__"]
    held = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.pop("__spec__", None)
        main.__dict__.update(held)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
