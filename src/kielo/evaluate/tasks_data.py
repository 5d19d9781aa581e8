"""The data of the harness's tasks: brought beforehand by `kielo prefetch`, and read without a network.

The harness loads them by the library `datasets`. Its cache is the folder datasets/ of `kielo prefetch`, else
the user's own. A path there ends with the commit of the data.
"""

import importlib.util
import logging
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from kielo.artifact.prefetched import DATASETS_FOLDER, prefetched_folder
from kielo.recipe.errors import KieloError

_SEEDS = 0, 1234  # of Python and numpy, as the harness's own program sets them


def refuse_without_harness() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise KieloError("evaluate.tasks: lm-eval is not installed. Fix: pip install 'kielo[evaluate]'")


def harness_version() -> str:
    return metadata.version("lm_eval")


@contextmanager
def harness_surroundings(datasets_folder: Path | None = None, is_online: bool = False) -> Iterator[None]:
    """Let the harness load data from `datasets_folder` (default: what was brought, else the user's cache).

    Its random numbers begin at its own seeds, and this process keeps its own. Without a terminal its bars are
    not shown.
    """
    import datasets
    import huggingface_hub.constants as hub

    if datasets_folder is None and (brought := prefetched_folder()) is not None:
        datasets_folder = brought / DATASETS_FOLDER
    states = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        # The harness starts processes for standard errors, and the process of a watch cannot have children.
        stack.enter_context(_set_variable("DISABLE_MULTIPROC", "1"))
        for of, name in ((hub, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")):
            stack.enter_context(_set(of, name, not is_online))
        if datasets_folder is not None:
            stack.enter_context(_set(datasets.config, "HF_DATASETS_CACHE", datasets_folder))
        for name in ("lm_eval", "datasets", "evaluate"):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        random.seed(_SEEDS[0])
        np.random.seed(_SEEDS[1])
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def _set(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def _set_variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


@contextmanager
def quiet_bars() -> Iterator[None]:
    """Hide the bars of the harness if stderr is no terminal.

    What the harness and task files print to stdout is always hidden.
    """
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(StringIO()))
        if not sys.stderr.isatty():
            stack.enter_context(redirect_stderr(StringIO()))
        yield


def why_not_loaded(error: Exception, is_online: bool) -> str:
    """Return why a task could not be loaded, with a fix if its data or a package are missing."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if isinstance(error, KieloError):
        return reason
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").split(".")[0]
        return f"its file needs the package {package}. Fix: pip install {package}"
    is_missing = isinstance(error, OSError) or "find cache" in reason or "NotFound" in type(error).__name__
    if is_missing and is_online:
        return f"its data cannot be downloaded ({reason})"
    if is_missing:
        return (
            f"its data are not on this machine ({reason}). Fix: kielo prefetch RECIPE --to DIR on a machine "
            "with a network, then export KIELO_PREFETCHED=DIR"
        )
    if isinstance(error, IndexError | StopIteration):
        return f"its set of questions is empty, or its first question cannot be read ({reason})"
    return f"the harness cannot load it ({type(error).__name__}: {reason})"


def data_of(task: Any) -> list[Path]:
    """Return the folders of the task's data in the cache: …/REPOSITORY/CONFIGURATION/VERSION/COMMIT."""
    splits = task.dataset.values() if hasattr(task.dataset, "values") else []
    files = (file["filename"] for split in splits for file in getattr(split, "cache_files", ()))
    return list(dict.fromkeys(Path(file).parent for file in files))


def origin_of_data(folders: Sequence[Path]) -> str:
    """Return repositories and commits of cached data."""
    parts = [
        (folder.parts[-4].replace("___", "/"), folder.name) for folder in folders if len(folder.parts) > 3
    ]
    named = [f"{name}, commit {commit}" for name, commit in parts if "/" in name]
    return f"Hugging Face hub: {'; '.join(named)}" if named else "files of the task"
