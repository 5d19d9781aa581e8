"""`kielo train`: one rank of a run, or the parent of all ranks on this machine.

A rank is started by torchrun, by srun, or alone. With `--ranks N` this process starts the ranks, passes
signals on, gives them time to save, and turns the outcome file into the exit code.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from kielo.cli.flags import examples, takes_recipe
from kielo.cli.main import REQUEUE
from kielo.cli.terminal import keep_stdout_for_json, print_json
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.recipe.sections import Recipe
from kielo.train.signals import Presses, give_signals_back, take_over_signals

FETCH_LIMIT_SECONDS = 4 * 3600  # 1.4 TB at 100 MB/s
# environment variable: where ranks tell their parent why they did not begin
REFUSAL_FILE = "KIELO_REFUSAL_FILE"


def train_flags(parser: argparse.ArgumentParser) -> None:
    examples(
        parser, "kielo train RECIPE --ranks 2", "torchrun --nproc-per-node 8 --no-python kielo train RECIPE",
        "srun kielo train RECIPE",
    )  # fmt: skip
    takes_recipe(parser)
    parser.add_argument("--ranks", type=int, default=None, help="start so many processes on this machine")
    parser.add_argument(
        "--shutdown-seconds", type=int, default=600, help="time to save after a stop signal (with --ranks)"
    )
    parser.add_argument(
        "--profile",
        type=int,
        nargs="?",
        const=10,
        metavar="STEPS",
        help="from the third step on, record so many (default: 10): where their time goes, and a trace",
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def train(options: argparse.Namespace) -> int:
    recipe = read_recipe(options.recipe, options.sets).recipe
    ranks = 1 if options.ranks is None or is_rank() else options.ranks
    if ranks < 1:
        raise KieloError(f"--ranks {ranks}: give 1 or more")
    if options.profile is not None and options.profile < 1:
        raise KieloError(f"--profile {options.profile}: give 1 step or more")
    profile_steps = options.profile or 0
    with keep_stdout_for_json(options.json):
        if ranks > 1:
            outcome = start_ranks(
                recipe, options.recipe, options.sets, ranks, options.shutdown_seconds, profile_steps
            )
        else:
            outcome = train_here(recipe, profile_steps)
    if options.json:
        print_json(outcome)
    elif outcome["exit_code"] not in (0, REQUEUE):
        print(f"kielo: training failed: {outcome['message']}", file=sys.stderr)
    elif outcome["message"] and not _is_told_by_another():
        print(outcome["message"])
    return outcome["exit_code"]


def _is_told_by_another() -> bool:
    """By the first of several ranks, or by the parent that started them."""
    return os.environ.get("RANK", "0") != "0" or REFUSAL_FILE in os.environ


def is_rank() -> bool:
    """Whether a launcher started this process as one rank of several."""
    return "RANK" in os.environ


def train_here(recipe: Recipe, profile_steps: int = 0) -> dict[str, Any]:
    """Be one rank: resolve the recipe for the world that the launcher's variables tell of, and train.

    A refusal is noted for the parent that started this rank, if one did.
    profile_steps: how many steps of this attempt the profiler records (see `train/profile.py`); 0: none.
    """
    import torch

    from kielo.artifact.weights_folder import resolve_weights
    from kielo.parallel.once_a_node import once_a_node
    from kielo.parallel.rendezvous import find_rendezvous
    from kielo.plan.expected_speed import with_expectation
    from kielo.resolve.resolve import resolve
    from kielo.train.run import train

    place = find_rendezvous()
    folder = run_folder(recipe)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    device_name = torch.cuda.get_device_name() if device == "cuda" else None
    weights = recipe.model.weights
    try:
        if weights is not None:  # or every rank would ask the hub for them
            once_a_node(
                f"find {weights}",
                lambda: resolve_weights(weights),
                place,
                recipe.train.start_timeout_seconds,
                FETCH_LIMIT_SECONDS,
            )
        resolved = resolve(recipe, folder, world_size=place.size, device=device, accelerator=device_name)
        return train(with_expectation(resolved, recipe), profile_steps=profile_steps)
    except KieloError as error:
        if file := os.environ.get(REFUSAL_FILE):
            Path(file).write_text(str(error), encoding="utf-8")
        raise


def start_ranks(
    recipe: Recipe,
    reference: str,
    sets: Sequence[str],
    ranks: int,
    shutdown_seconds: int = 600,
    profile_steps: int = 0,
) -> dict[str, Any]:
    """Start `ranks` processes of `kielo train` on this machine, wait, and return what they wrote as their
    outcome.

    Raises KieloError for numbers that so many ranks cannot run, before any of them is started.
    """
    from kielo.resolve.resolve import resolve

    resolve(recipe, run_folder(recipe), world_size=ranks, device="cpu")
    outcome_file = run_folder(recipe) / "train" / "outcome.json"
    outcome_before = _state_of(outcome_file)
    arguments = [argument for entry in sets for argument in ("--set", entry)]
    if profile_steps:
        arguments += ["--profile", str(profile_steps)]
    from kielo.parallel.local_ranks import Ranks

    refusal = tempfile.NamedTemporaryFile("r", prefix="kielo_", encoding="utf-8")  # noqa: SIM115 - until it was read, below
    started = Ranks(
        ["-m", "kielo", "train", reference, *arguments], ranks, REQUEUE, {REFUSAL_FILE: refusal.name}
    )
    presses = Presses()

    def note(number: int, frame: FrameType | None) -> None:
        if presses.is_second(number):
            raise KeyboardInterrupt
        if not started.is_stopping:
            started.stop(number)

    handlers_before = take_over_signals(note)
    try:
        started.start(is_quiet=sys.stdout is sys.stderr)  # under --json
        failure = started.wait(shutdown_seconds)
    except BaseException:
        started.kill()
        raise
    finally:
        give_signals_back(handlers_before)
    return read_outcome(outcome_file, failure, outcome_before, started.is_stopping, refusal.read())


def read_outcome(
    outcome_file: Path,
    failure: str,
    outcome_before: tuple[int, int] | None,
    is_stopping: bool,
    refusal: str = "",
) -> dict[str, Any]:
    """What the ranks wrote; when they could not, what became of them: `failure`, or a stop before they had
    begun.

    outcome_before: the file's state before they were started. Ranks that were refused leave it alone, so what
    lies there then is another job's, or an earlier attempt's. refusal: why they did not begin, if they said
    so.
    """
    try:
        outcome = json.loads(outcome_file.read_text(encoding="utf-8"))
        if _state_of(outcome_file) != outcome_before:
            return outcome | {"exit_code": int(outcome["exit_code"]), "message": str(outcome["message"])}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if is_stopping:
        message = (
            f"stopped before training began ({failure}); nothing was changed, the same command starts it"
        )
        return {"outcome": "requeue", "exit_code": REQUEUE, "message": message}
    message = (
        refusal
        or f"{failure or 'the ranks ended'}, without {outcome_file}; the first error above is the cause"
    )
    return {"outcome": "failed", "exit_code": 1, "message": message}


def _state_of(file: Path) -> tuple[int, int] | None:
    """Inode and time of change, which tell a rewritten file from the one before; None where there
    is no file.
    """
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
