"""The training stage on one rank: a resolved run → checkpoints, metrics, `outcome.json` and, at the end, a manifest.

`kielo train` calls `train` on every rank; launchers meet it only here.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from kielo.artifact.lease import Lease
from kielo.checkpoint.agreement import Agreement
from kielo.parallel.rendezvous import find_rendezvous
from kielo.parallel.world import World, end_world, start_world
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Identity, Resolved
from kielo.resolve.resolved import write as write_resolved
from kielo.train.build import Run, assemble, enter
from kielo.train.loop import fit
from kielo.train.manifest import (
    EXIT_CODES,
    forget_outcome,
    has_outcome,
    is_finished,
    withdraw_manifest,
    write_outcome,
    write_train_manifest,
)
from kielo.train.precision_change import look, next_look, settle_precision
from kielo.train.state import State
from kielo.train.step_row import passed_over_row
from kielo.train.stop import Stop


def train(resolved: Resolved, max_steps: int | None = None, profile_steps: int = 0) -> dict[str, Any]:
    """Start or go on with the run; the same answer on every rank: {"outcome", "step", "tokens", "exit_code", "message"}.

    outcome is "finished" (exit code 0) or "requeue" (75: stopped by SIGTERM, SIGUSR1 or at step `max_steps`, saved,
    and to be started again). A run that was finished before is left as it is. `resolved.toml` in the run's folder is
    written anew. An error is written down as "failed" and raised; while another job trains in the folder it is only raised
    (KieloError), and nothing there is changed. profile_steps: how many steps to record, from the third on.
    """
    is_first = find_rendezvous().rank == 0
    identity = resolved.identity
    if is_finished(resolved):
        if is_first:
            _write_plan(resolved)
        state = State(identity.total_steps, identity.total_tokens)
        return _settle(resolved, "finished", state, is_first, "nothing to do: the run was finished before")
    with Stop(max_steps) as stop:
        try:
            world = start_world(resolved.placement.start_timeout_seconds, resolved.placement.device)
            with _lease(resolved, world) as lease:
                return _attempt(resolved, world, stop, lease, profile_steps)
        finally:
            end_world()


@contextmanager
def _lease(resolved: Resolved, world: World) -> Iterator[Lease]:
    """The folder's lease, which rank 0 takes, keeps and gives back for all. Refused on all ranks together."""
    lease = Agreement().on_first(lambda: Lease.take(resolved.placement.train_folder))
    with lease.beating() if world.rank == 0 else nullcontext():
        yield lease


def _attempt(
    resolved: Resolved, world: World, stop: Stop, lease: Lease, profile_steps: int
) -> dict[str, Any]:
    is_first, state = world.rank == 0, State()
    try:
        if is_first:
            forget_outcome(resolved)
        run = assemble(resolved, world, stop, lease.check, profile_steps)
        state = run.state
        if is_first:
            _write_plan(resolved)
            withdraw_manifest(resolved)
        outcome = _fit_and_close(run, resolved)
        if is_first:
            lease.check()
            if outcome == "finished":
                write_train_manifest(resolved, run.checkpoints.newest)
        return _settle(resolved, outcome, state, is_first)
    except Exception as error:
        _note_failure(resolved, error, state, is_first, lease)
        raise


def _write_plan(resolved: Resolved) -> None:
    write_resolved(resolved, Path(resolved.placement.train_folder).parent / "resolved.toml")


def _fit_and_close(run: Run, resolved: Resolved) -> str:
    try:
        return _fit_phases(run, resolved)
    finally:
        run.checkpoints.close()
        run.profile.close()
        run.log.close()
        run.close_feed()


def _fit_phases(run: Run, resolved: Resolved) -> str:
    """Train from the newest checkpoint through all phases, or until a signal: "finished" or "requeue".

    Raises KieloError when too many steps in a row were not finite, and when the last checkpoint cannot be saved.
    """
    state, identity = run.state, resolved.identity
    run.restore()
    run.log.start(state.step)
    run.meter.start(state.tokens)
    is_stopped = False
    while state.step < identity.total_steps and not is_stopped:
        settle_precision(run, resolved)
        index, last_step, is_skipped = identity.stretch(state.step + 1)
        if is_skipped:
            is_stopped = _pass_over(run, identity, index, last_step)
        else:
            enter(run, resolved, index, min(last_step, next_look(run, identity.fp8)))
            is_stopped = fit(run)
            if not is_stopped:
                look(run, resolved)
    run.checkpoints.settle()  # the last save must succeed; one before it that failed was told, and tried again
    return "finished" if state.step == identity.total_steps else "requeue"


def _pass_over(run: Run, identity: Identity, index: int, last_step: int) -> bool:
    """Leave the text up to `last_step` behind without training on it: whether a signal came, the same on every rank."""
    state, phase, tokens_before, first_step = run.state, identity.phases[index], run.state.tokens, run.state.step + 1
    state.pass_over(last_step, phase.tokens_per_step, phase.sequences_per_step)
    run.meter.pass_over(tokens_before, state.tokens)
    run.log.write(passed_over_row(state, phase.number, first_step))
    is_stopped = run.stop.agreed(last_step)
    if is_stopped or last_step == identity.total_steps:
        run.checkpoints.save(None)
    return is_stopped


def _note_failure(resolved: Resolved, error: Exception, state: State, is_first: bool, lease: Lease) -> None:
    """Any rank may be the only one that knows what went wrong; mostly all do, and one file is enough."""
    if not is_first and (not isinstance(error, KieloError) or has_outcome(resolved)):
        return
    message = str(error) if isinstance(error, KieloError) else f"{type(error).__name__}: {error}"
    # A full disk may be the very failure, and must not hide behind this one; nor must a job that took the folder over.
    with suppress(OSError, KieloError):
        lease.check()
        write_outcome(resolved, "failed", state.step, state.tokens, message)


def _settle(resolved: Resolved, outcome: str, state: State, is_first: bool, message: str = "") -> dict[str, Any]:
    if is_first:
        return write_outcome(resolved, outcome, state.step, state.tokens, message)
    return {
        "outcome": outcome,
        "step": state.step,
        "tokens": state.tokens,
        "exit_code": EXIT_CODES[outcome],
        "message": message,
    }
