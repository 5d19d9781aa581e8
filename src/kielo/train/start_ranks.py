"""Training on several ranks of this machine: start them, pass signals on, wait, and return their outcome.

Each rank is a process of `kielo train`. The ranks write their outcome into a file, because the exit codes of
several processes say less.
"""

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from kielo.artifact.outcome import EXIT_CODES, REFUSAL_FILE, Outcome
from kielo.artifact.stage_json import read_json
from kielo.parallel.local_ranks import Ranks
from kielo.recipe.errors import KieloError
from kielo.recipe.read import run_folder
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.software import installed
from kielo.train.signals import Presses, give_signals_back, take_over_signals


def start_ranks(
    recipe: Recipe,
    reference: str,
    arguments: Sequence[str],
    ranks: int,
    shutdown_seconds: int = 600,
    is_quiet: bool = False,
) -> Outcome:
    """Start `ranks` processes of `kielo train REFERENCE ARGUMENTS…`, wait for them, and return their outcome.

    shutdown_seconds: time to save after a stop signal. is_quiet: what the ranks print goes to stderr.
    Raises KieloError for numbers that so many ranks cannot run, before any of them is started.
    """
    resolve(recipe, run_folder(recipe), world_size=ranks, device="cpu", software=installed("cpu"))
    folder = run_folder(recipe) / "train"
    state_before = _state_of(folder / Outcome.FILE_NAME)
    with tempfile.NamedTemporaryFile("r", prefix="kielo_", encoding="utf-8") as refusal:
        started = Ranks(
            ["-m", "kielo", "train", reference, *arguments],
            ranks,
            EXIT_CODES["requeue"],
            {REFUSAL_FILE: refusal.name},
        )
        failure = _wait(started, shutdown_seconds, is_quiet)
        return read_outcome(folder, state_before, failure, started.is_stopping, refusal.read())


def _wait(ranks: Ranks, shutdown_seconds: int, is_quiet: bool) -> str:
    """Start the ranks and wait until all have ended; "" if none failed, else which did and how."""
    presses = Presses()

    def note(number: int, frame: FrameType | None) -> None:
        if presses.is_second(number):
            raise KeyboardInterrupt
        if not ranks.is_stopping:
            ranks.stop(number)

    handlers_before = take_over_signals(note)
    try:
        ranks.start(is_quiet)
        return ranks.wait(shutdown_seconds)
    except BaseException:
        ranks.kill()
        raise
    finally:
        give_signals_back(handlers_before)


def read_outcome(
    folder: Path, state_before: tuple[int, int] | None, failure: str, is_stopping: bool, refusal: str = ""
) -> Outcome:
    """Returns the outcome in `folder`; without a readable one, an outcome that says how the ranks ended.

    state_before: the file's state before the ranks were started. Ranks that were refused leave the file
    alone, so it is then another job's, or an earlier attempt's. refusal: why they did not begin, if they said
    so.
    """
    file = folder / Outcome.FILE_NAME
    with suppress(OSError, KieloError):
        outcome = read_json(folder, Outcome)
        if outcome is not None and _state_of(file) != state_before:
            return outcome
    if is_stopping:
        message = (
            f"stopped before training began ({failure}); nothing was changed, the same command starts it"
        )
        return Outcome(
            outcome="requeue", step=None, tokens=None, exit_code=EXIT_CODES["requeue"], message=message
        )
    message = refusal or f"{failure or 'the ranks ended'}, without {file}; the first error above is the cause"
    return Outcome(outcome="failed", step=None, tokens=None, exit_code=EXIT_CODES["failed"], message=message)


def _state_of(file: Path) -> tuple[int, int] | None:
    """Returns the file's inode and time of change, which tell a rewritten file from the one before.

    None where there is no file.
    """
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
