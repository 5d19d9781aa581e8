"""An attempt at the training of a recipe on this machine: its devices, its ranks, and if it is needed.

A finished training needs no torch.
"""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kielo.artifact.attempt_files import REFUSAL_FILE, Outcome, Refusal, note_refusal
from kielo.artifact.manifest import read_manifest
from kielo.artifact.weights_folder import resolve_weights, weights_here
from kielo.plan.cost import with_expectation
from kielo.plan.remedies import memory_warning
from kielo.ranks.process_settings import settings_of_device, settle_allocator
from kielo.ranks.rendezvous import find_rendezvous
from kielo.recipe.cards import accelerator, cluster
from kielo.recipe.errors import KieloError, print_text, sentence
from kielo.recipe.read import run_folder
from kielo.recipe.sections import Recipe
from kielo.resolve.complete_model import overridden_in_words
from kielo.resolve.resolve import resolve, resolve_to_score
from kielo.resolve.resolved import Resolved, filled, read
from kielo.resolve.shares import uneven_steps
from kielo.resolve.software import RESOLVED_NAME, chosen_precision, installed, start_timeout_seconds
from kielo.stages import late
from kielo.train.records import is_finished, nothing_to_do
from kielo.train.start_ranks import RESTARTS, start_ranks, start_verb

# Errors of the system that do not go away by themselves.
_LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)
FETCH_LIMIT_SECONDS = 4 * 3600  # 1.4 TB at 100 MB/s


def warn_of_weights(recipe: Recipe) -> None:
    """Name the keys of [model] that model.weights replaces, and its unread files, on stderr."""
    if said := overridden_in_words(recipe.model):
        print_text(f"warning: {said}", sys.stderr)


def train_on_ranks(
    recipe: Recipe,
    reference: str,
    sets: Sequence[str],
    ranks: int,
    flags: Sequence[str] = (),
    shutdown_seconds: int = 600,
    restarts: int | None = None,
) -> Outcome:
    """Train on `ranks` processes of this machine: `kielo train REFERENCE` with these settings and flags.

    `restarts` is the largest number of restarts without a new checkpoint, None for the usual number.
    """
    done = None if "--measure" in flags else done_before(recipe, ranks)
    if done is not None:
        return done
    arguments = [argument for entry in sets for argument in ("--set", entry)] + list(flags)
    is_quiet = sys.stdout is sys.stderr  # under --json
    most = RESTARTS if restarts is None else restarts
    return start_ranks(recipe, reference, arguments, ranks, shutdown_seconds, is_quiet, most)


def is_done(recipe: Recipe, ranks: int) -> bool:
    """Return True if the run is known without torch to be finished, so that no rank will be started."""
    return _finished(recipe, ranks) is not None


def done_before(recipe: Recipe, ranks: int) -> Outcome | None:
    """Return the outcome of a finished run, noted as this attempt's outcome, or None if torch has to look."""
    resolved = _finished(recipe, ranks)
    return None if resolved is None else nothing_to_do(resolved)


def _finished(recipe: Recipe, ranks: int) -> Resolved | None:
    """Return the run resolved for `ranks` if it was trained to its end before. Read only files.

    The run's devices come from its resolved.toml: only torch knows this machine's devices, and the trained
    model does not depend on them. Return None without resolved.toml or if anything is wrong. The caller then
    begins as if the run was not finished and reports the cause.
    """
    folder = run_folder(recipe)
    if not (folder / RESOLVED_NAME).is_file() or read_manifest(folder / "train") is None:
        return None
    try:
        before = read(folder / RESOLVED_NAME).placement
        software = installed(before.device)
        resolved = resolve(recipe, folder, ranks, before.device, before.accelerator, software=software)
        return with_expectation(resolved, recipe) if is_finished(resolved) else None
    except KieloError:
        return None


def train_here(recipe: Recipe, profile_steps: int = 0, measured_steps: int | None = None) -> Outcome:
    """Be one rank: resolve the recipe for the world that the launcher's variables describe, and train.

    A refusal is written down for the parent that started this rank. profile_steps: steps of this attempt that
    the profiler records (see `train/profile.py`); 0: none. measured_steps: steps to take without saving;
    None: the whole run, with its checkpoints.
    """
    place = find_rendezvous()
    # Several ranks decide it together, because one rank may see another folder.
    done = done_before(recipe, 1) if place.size == 1 and measured_steps is None else None
    if done is not None:
        return done
    if this_device() == "cuda":
        card = accelerator(cluster(recipe.cluster).accelerator)
        said = settle_allocator(settings_of_device() or card.allocator_settings)
        if said and place.rank == 0:
            print_text(f"device memory: {said}")
    weights = recipe.model.weights
    try:
        if weights is not None:  # or every rank would ask the hub for them
            is_fetched = weights_here(weights) is None
            late.once_a_node(
                f"find {weights}",
                lambda: resolve_weights(weights),
                place,
                late.meet(place, start_timeout_seconds(recipe)),
                FETCH_LIMIT_SECONDS,
            )
            if is_fetched and place.rank == 0:
                warn_of_weights(recipe)
        resolved, why = resolve_here(recipe, place.size)
        if place.rank == 0 and recipe.train.precision is None:
            print_text(f"precision: {resolved.identity.train.precision}, for {why}")
        if place.rank == 0:
            for line in uneven_steps(resolved):
                print_text(f"batches: {line}")
            if warning := memory_warning(resolved, recipe):
                print(f"warning: {warning}", file=sys.stderr)
        resolved = with_expectation(resolved, recipe)
        if measured_steps is not None:
            return late.measure(resolved, measured_steps, profile_steps)
        asked: dict[str, Any] = {}
        if recipe.evaluate.every_steps:
            tasks = late.TasksInTraining(recipe.evaluate, resolved)
            asked = {"ready": tasks.ready, "periodic": tasks.periodic()}
        return late.train(resolved, profile_steps=profile_steps, **asked)
    except (KieloError, OSError) as error:
        if isinstance(error, KieloError) or error.errno in _LASTING:
            note_refusal(Refusal(message=sentence(error) or ""))
        raise


def on_ranks(arguments: Sequence[str], ranks: int | None, work: Callable[[], int]) -> int | None:
    """Do a verb's work on the ranks of a job, and return its exit code; None if one process should do it.

    A launcher's rank calls `work`. Another process with `ranks` starts them with `kielo ARGUMENTS`, or calls
    `work` itself as the only rank.
    """
    is_a_rank = find_rendezvous().size > 1
    if not is_a_rank and ranks is None:
        return None
    if not is_a_rank and ranks != 1:
        return start_verb(arguments, filled(ranks))
    try:
        return work()
    except (KieloError, OSError) as error:
        if REFUSAL_FILE not in os.environ:
            raise
        said = sentence(error) or f"{type(error).__name__}: {error}"
        note_refusal(Refusal(message=said))  # the process that started this rank prints it
        return 1


def placed_here(recipe: Recipe, ranks: int) -> Resolved:
    """Place the model of a trained run on this machine's devices, to score or verify it."""
    device = this_device()
    return resolve_to_score(recipe, run_folder(recipe), ranks, device, device_name(device), installed(device))


def this_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(device: str) -> str | None:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else None


def resolve_here(recipe: Recipe, ranks: int) -> tuple[Resolved, str]:
    """Resolve the recipe on this machine's devices. Return it and the reason for its precision."""
    folder, device = run_folder(recipe), this_device()
    software = installed(device)
    missing = software.missing_compiler
    is_first = os.environ.get("RANK", "0") == "0"
    if missing and is_first and device == "cuda" and recipe.layout.compile is None:
        print(f"warning: layers are not compiled; {missing}", file=sys.stderr)
    why = chosen_precision(recipe, device, software.has_amx, folder)[1]
    return resolve(recipe, folder, ranks, device, device_name(device), software=software), why
