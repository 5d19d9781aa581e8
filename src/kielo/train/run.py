"""The training stage on one rank: a resolved run → checkpoints, metrics, `outcome.json` and, at the end, a manifest.

`kielo train` calls `train` on every rank; launchers meet it only here.
"""

from contextlib import suppress
from typing import Any

from kielo.parallel.rendezvous import find_rendezvous
from kielo.parallel.world import end_world, start_world
from kielo.plan.resolved import Resolved
from kielo.recipe.errors import KieloError
from kielo.train.build import Run, assemble
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
from kielo.train.state import State
from kielo.train.stop import Stop


def train(resolved: Resolved, max_steps: int | None = None) -> dict[str, Any]:
    """Start or go on with the run; the same answer on every rank: {"outcome", "step", "tokens", "exit_code", "message"}.

    outcome is "finished" (exit code 0) or "requeue" (75: stopped by SIGTERM, SIGUSR1 or at step `max_steps`, saved,
    and to be started again). A run that was finished before is left as it is. An error is written down as "failed" and
    raised.
    """
    is_first = find_rendezvous().rank == 0
    identity, state = resolved.identity, State()
    if is_finished(resolved):
        state = State(identity.total_steps, identity.total_steps * identity.tokens_per_step)
        return _settle(resolved, "finished", state, is_first, "nothing to do: the run was finished before")
    if is_first:
        forget_outcome(resolved)
    with Stop(max_steps) as stop:
        try:
            world = start_world(resolved.placement.start_timeout_seconds, resolved.placement.device)
            run = assemble(resolved, world, stop)
            state = run.state
            if is_first:
                withdraw_manifest(resolved)
            outcome = _fit_and_close(run)
            if is_first and outcome == "finished":
                write_train_manifest(resolved, run.checkpoints.newest)
            return _settle(resolved, outcome, state, is_first)
        except Exception as error:
            _note_failure(resolved, error, state, is_first)
            raise
        finally:
            end_world()


def _fit_and_close(run: Run) -> str:
    try:
        return fit(run)
    finally:
        run.log.close()
        run.feed.close()


def _note_failure(resolved: Resolved, error: Exception, state: State, is_first: bool) -> None:
    """Any rank may be the only one that knows what went wrong; mostly all do, and one file is enough."""
    if not is_first and (not isinstance(error, KieloError) or has_outcome(resolved)):
        return
    message = str(error) if isinstance(error, KieloError) else f"{type(error).__name__}: {error}"
    with suppress(OSError):  # a full disk may be the very failure, and must not hide behind this one
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
