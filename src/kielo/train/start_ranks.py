"""Training on several ranks of this machine: start them, pass signals on, wait, and return their outcome.

The ranks write their outcome into a file, because exit codes say less. Killed or hung ranks are restarted. A
refusal, a full disk or the same failure at the same step would recur. Torch-free.
"""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from types import FrameType

from kielo.artifact.attempt_files import (
    ALERTS_NAME,
    EXIT_CODES,
    REFUSAL_FILE,
    STARTED_BY,
    Outcome,
    append_alert,
    read_refusal,
    stopped_before_training,
)
from kielo.artifact.checkpoint_folder import newest_written
from kielo.artifact.stage_json import read_json
from kielo.ranks.local_ranks import Failure, Ranks
from kielo.recipe.errors import KieloError
from kielo.recipe.read import run_folder
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.software import installed
from kielo.train.signals import Presses, give_signals_back, take_over_signals

RESTARTS = 3  # in a row without a new checkpoint
_USAGE = 2
_VERB_SHUTDOWN_SECONDS = 10
_NOT_TO_BE_FORKED = ("nvidia0", "kfd", "dxg")  # devices whose libraries do not work in a forked process
_MODULES = ("kielo.train.run", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")


@dataclass(frozen=True)
class Attempt:
    """The end of an attempt. refusal: a rank's message that a person can act on, or ""."""

    failure: Failure
    outcome: Outcome
    refusal: str
    newest: str

    @property
    def is_temporary(self) -> bool:
        """True if a rank was killed or hung, which need not be the program's fault."""
        return self.failure.code < 0 or self.outcome.outcome == "hung"


def why_not_again(attempts: list[Attempt], most: int) -> str | None:
    """Return why not to restart ("" if plain), or None. `most` limits restarts without a new checkpoint."""
    last = attempts[-1]
    if last.failure.code == _USAGE or (last.refusal and not last.is_temporary):
        return ""
    without_new = 0
    for attempt in reversed(attempts):
        if attempt.newest != last.newest:
            break
        without_new += 1
    if without_new > most:
        return f"{without_new} attempts in a row made no new checkpoint" if most else ""
    if len(attempts) > 1 and _is_same(attempts[-2], last):
        return "twice the same failure at the same step"
    return None


def _is_same(one: Attempt, other: Attempt) -> bool:
    at = one.newest, one.outcome.step
    return at == (other.newest, other.outcome.step) and (
        one.failure == other.failure
        if one.is_temporary or other.is_temporary
        else one.outcome.message == other.outcome.message
    )


def start_ranks(
    recipe: Recipe,
    reference: str,
    arguments: Sequence[str],
    ranks: int,
    shutdown_seconds: int = 600,
    is_quiet: bool = False,
    restarts: int = RESTARTS,
) -> Outcome:
    """Start `ranks` processes of `kielo train REFERENCE ARGUMENTS…`, wait for them, and return their outcome.

    shutdown_seconds: time to save after a stop signal. is_quiet: the ranks print to stderr. restarts: most in
    a row without a new checkpoint. Raises KieloError before any start for values that do not fit `ranks`.
    """
    resolve(recipe, run_folder(recipe), world_size=ranks, device="cpu", software=installed("cpu"))
    folder = run_folder(recipe) / "train"
    attempts: list[Attempt] = []
    name = token_hex(8)
    with tempfile.NamedTemporaryFile("r", prefix="kielo_", encoding="utf-8") as refusal:
        started = Ranks(
            ["-m", "kielo", "train", reference, *arguments],
            ranks,
            EXIT_CODES["requeue"],
            {REFUSAL_FILE: refusal.name, STARTED_BY: name},
            _modules(),
        )
        while True:
            state_before = _state_of(folder / Outcome.FILE_NAME)
            Path(refusal.name).write_text("", encoding="utf-8")
            failure = _wait(started, shutdown_seconds, is_quiet)
            refused = read_refusal(Path(refusal.name))
            said = refused.message if refused else ""
            outcome = read_outcome(folder, state_before, str(failure or ""), started.is_stopping, said, name)
            if failure is None or started.is_stopping or outcome.outcome in ("finished", "requeue"):
                break
            attempts.append(Attempt(failure, outcome, said, newest_written(folder / "checkpoints")))
            why_not = why_not_again(attempts, restarts)
            if why_not is not None:
                if why_not:
                    message = f"{outcome.message}. The ranks are not restarted: {why_not}"
                    outcome = outcome.model_copy(update={"message": message})
                break
            _say_again(folder, attempts[-1])
        started.close()
        return outcome


def start_verb(arguments: Sequence[str], ranks: int) -> int:
    """Start `ranks` processes of `kielo ARGUMENTS…`, of which rank 0 prints, and return their exit code.

    Raise KieloError for the refusal that a rank has noted.
    """
    with tempfile.NamedTemporaryFile("r", prefix="kielo_", encoding="utf-8") as refusal:
        started = Ranks(
            ["-m", "kielo", *arguments],
            ranks,
            EXIT_CODES["requeue"],
            {REFUSAL_FILE: refusal.name},
            _modules(),
        )
        failure = _wait(started, _VERB_SHUTDOWN_SECONDS, is_quiet=False)
        started.close()
        refused = read_refusal(Path(refusal.name))
    if started.is_stopping:
        raise KeyboardInterrupt
    if refused is not None:
        raise KieloError(refused.message)
    if failure is not None and failure.code < 0:
        raise KieloError(f"{failure}, and the other ranks with it")
    return 0 if failure is None else failure.code


def _modules() -> Sequence[str]:
    """Return the modules to import before ranks are forked. With a GPU each rank imports for itself."""
    return () if any(Path("/dev", name).exists() for name in _NOT_TO_BE_FORKED) else _MODULES


def _say_again(folder: Path, attempt: Attempt) -> None:
    from_where = f"from {attempt.newest}" if attempt.newest else "from the start, because nothing was saved"
    why, said = str(attempt.failure), attempt.outcome.message
    is_said = why in said or attempt.outcome.outcome == "hung"  # ranks that hang end each other
    message = f"{said if is_said else f'{why} ({said})'}. The ranks are restarted {from_where}"
    print(f"kielo: {message}", file=sys.stderr, flush=True)
    with suppress(OSError):
        append_alert(folder / ALERTS_NAME, attempt.outcome.step or 0, message)


def _wait(ranks: Ranks, shutdown_seconds: int, is_quiet: bool) -> Failure | None:
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
    folder: Path,
    state_before: tuple[int, int] | None,
    failure: str,
    is_stopping: bool,
    refusal: str = "",
    started_by: str = "",
) -> Outcome:
    """Return the outcome in `folder`, or else an outcome that says how the ranks ended.

    An unchanged file (`state_before`) or another name (`started_by`) belongs to another job or attempt.
    refusal: why the ranks did not begin.
    """
    file = folder / Outcome.FILE_NAME
    with suppress(OSError, KieloError):
        outcome = read_json(folder, Outcome)
        if outcome is not None and outcome.started_by == started_by and _state_of(file) != state_before:
            return outcome
    if is_stopping:
        return stopped_before_training(failure)
    message = refusal or f"{failure or 'the ranks ended'}, without {file}. The first error above is the cause"
    return Outcome(outcome="failed", step=None, tokens=None, exit_code=EXIT_CODES["failed"], message=message)


def _state_of(file: Path) -> tuple[int, int] | None:
    """Return the file's inode and time of change, which a rewrite changes, or None without a file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
