"""The training stage on one rank: a resolved run → checkpoints, metrics, `outcome.json` and a manifest.

`kielo train` calls `train` on every rank; launchers use nothing else of this room.
"""

import faulthandler
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kielo.artifact.attempt_files import (
    REFUSAL_FILE,
    Ending,
    Outcome,
    Refusal,
    note_refusal,
    stopped_before_training,
)
from kielo.artifact.lease import Lease, held
from kielo.artifact.trained_text import has_trained
from kielo.checkpoint.agreement import Agreement
from kielo.parallel.mesh import alike_communicators, communicators
from kielo.ranks.hang_watch import Progress, silent_seconds
from kielo.ranks.heartbeat import Heartbeat
from kielo.ranks.rendezvous import find_rendezvous
from kielo.ranks.world import World, end_world, leave_together, start_world
from kielo.recipe.errors import KieloError, sentence
from kielo.resolve.resolved import Identity, Resolved, filled
from kielo.train.build import assemble, phase_parts, restore
from kielo.train.final_check import refuse_unsound_end
from kielo.train.go_back import go_back
from kielo.train.loop import fit
from kielo.train.meter import passed_over_row
from kielo.train.parts import Asked, Periodic, PrecisionParts, Run
from kielo.train.precision import determinism
from kielo.train.precision_change import check_watched_change, next_check, settle_precision
from kielo.train.records import (
    forget_outcome,
    has_outcome,
    is_finished,
    note_beginning,
    nothing_to_do,
    refuse_lost_checkpoints,
    settle,
    withdraw_manifest,
    write_plan,
    write_train_manifest,
)
from kielo.train.signals import Triggers
from kielo.train.start_checks import TokenCheck, check_tokenizer, refuse_unlike_ranks
from kielo.train.state import State
from kielo.train.stop import Stop, StoppedBeforeTraining


def train(
    resolved: Resolved,
    max_steps: int | None = None,
    profile_steps: int = 0,
    periodic: tuple[Callable[[PrecisionParts], Periodic], ...] = (),
) -> Outcome:
    """Start or continues the run; return the same outcome on every rank.

    It is "finished" (exit code 0) or "requeue" (75: stopped by a signal or at step `max_steps`, saved,
    and to be started again). A run that was finished before is left unchanged. `resolved.toml` in the run's
    folder is rewritten. An error is recorded as "failed" and raised; a refusal before training begins
    (KieloError: another job works in the folder, another identity, tokens that were altered) is only raised,
    and outcome, plan and manifest stay. profile_steps: how many steps to record, from the third on.
    periodic: see `Asked`.
    """
    is_first = find_rendezvous().rank == 0
    if is_finished(resolved):
        return nothing_to_do(resolved, is_first)
    triggers = Triggers(_run_folder(resolved))
    triggers.refuse_start()
    asked = Asked(profile_steps, periodic=periodic)
    return _started(resolved, Stop(max_steps, is_first, triggers if is_first else None), asked)


def measure(resolved: Resolved, steps: int, profile_steps: int = 0) -> Outcome:
    """Take the first `steps` steps that the recipe does not skip, for their speed, and saves nothing.

    Called by every rank; `resolved.toml`, the log and `outcome.json` are those of an attempt. Raises
    KieloError in the folder of a run that has trained, and for more steps than it has.
    """
    folder, identity, first = _run_folder(resolved), resolved.identity, 1
    if has_trained(folder):
        raise KieloError(
            f"{folder}: has trained, and its log is not for measurements. Fix: another folder, "
            "or kielo launch RECIPE --ladder 1, which makes one"
        )
    while (skipped := identity.next_steps(first)).is_skipped:
        first = skipped.last_step + 1
    last = first + steps - 1
    if last > identity.total_steps:
        raise KieloError(f"--measure {steps}: the run has {identity.total_steps - first + 1} steps to take")
    is_first = find_rendezvous().rank == 0
    return _started(resolved, Stop(last, is_first), Asked(profile_steps, is_saving=False))


def _started(resolved: Resolved, stop: Stop, asked: Asked) -> Outcome:
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a rank that a library aborts says where it was
    with determinism(resolved.placement.train.deterministic), stop:
        try:
            world = start_world(
                filled(resolved.placement.train.start_timeout_seconds), resolved.placement.device
            )
            with _lease(resolved, world) as lease:
                outcome = _attempt(resolved, world, stop, lease, asked)
            leave_together(resolved.placement.train.step_timeout_seconds)
            return outcome
        except StoppedBeforeTraining:
            return stopped_before_training()
        finally:
            end_world()


@contextmanager
def _lease(resolved: Resolved, world: World) -> Iterator[Lease]:
    """Take the run folder's lease on rank 0, for all ranks; a refusal is raised on all of them."""
    with ExitStack() as until_the_end:
        # Not on the other ranks, which only check the lease that they are sent.
        yield Agreement().on_first(lambda: until_the_end.enter_context(held(_run_folder(resolved))))


def _attempt(resolved: Resolved, world: World, stop: Stop, lease: Lease, asked: Asked) -> Outcome:
    is_first, state, has_begun, is_saving = world.rank == 0, State(), False, asked.is_saving
    refuse_unlike_ranks(resolved, Agreement())
    # before the records that mention them are touched
    if is_saving:
        Agreement().on_first(lambda: refuse_lost_checkpoints(resolved))
    progress = _progress(resolved, world)

    def note_hang(message: str, comes_again: bool, nodes: Sequence[str]) -> None:
        hang = Refusal(message=message, blamed_nodes=list(nodes))
        _note_hang(resolved, hang, comes_again, state if has_begun else None, lease)

    stacks = Path(resolved.placement.train_folder) / "stacks"
    try:
        with Heartbeat(world, progress, stacks, note_hang) as heartbeat:
            with TokenCheck(resolved, Agreement()) as tokens:  # they are read while the model is built
                begins = is_saving and not has_trained(_run_folder(resolved))
                warnings = Agreement().on_first(lambda: check_tokenizer(resolved)) if begins else []
                run = assemble(resolved, world, stop, lease.check, progress, asked)
                heartbeat.use(communicators(run.mesh), alike_communicators(run.mesh))
                state = run.state
                tokens.finish()
                for warning in warnings:
                    run.alert(run.checkpoints.newest_step or 0, warning)
            has_begun = True
            hosts = Agreement().gather(socket.gethostname())
            if is_first and is_saving:
                note_beginning(resolved, run.checkpoints.newest_step or 0, hosts)
            if is_first:
                forget_outcome(resolved)
                write_plan(resolved)
                withdraw_manifest(resolved)
            outcome = _fit_and_close(run, resolved)
        if not is_saving:
            is_measured = stop.is_at_limit(state.step)
            outcome = "finished" if is_measured else "requeue"
            message = f"nothing was saved after step {state.step:,}"
            return settle(resolved, outcome, (state.step, state.tokens), message, is_writing=is_first)
        if is_first:
            lease.check()
            if outcome == "finished":
                write_train_manifest(resolved, filled(run.checkpoints.newest))
        message = "" if outcome == "finished" else _how_to_go_on(run, resolved)
        return settle(resolved, outcome, (state.step, state.tokens), message, is_writing=is_first)
    except Exception as error:
        if has_begun or not isinstance(error, KieloError):
            _note_failure(resolved, error, state, is_first, lease)
        raise


def _progress(resolved: Resolved, world: World) -> Progress:
    train = resolved.placement.train
    # Nobody waits for one rank alone, and no other rank can tell that it is stuck.
    floor = train.hang_seconds if world.size > 1 else max(train.hang_seconds, train.step_timeout_seconds)
    silent = silent_seconds(floor, world.size)
    files = resolved.placement.file_stall_seconds
    return Progress(floor, silent, filled(train.start_timeout_seconds), train.step_timeout_seconds, files)


def _note_hang(
    resolved: Resolved, hang: Refusal, comes_again: bool, state: State | None, lease: Lease
) -> None:
    """Records a hang, on one rank; one that comes again is a failure.

    state: None before training began, when earlier records are kept.
    """
    if state is not None:
        what: Ending = "failed" if comes_again else "hung"
        with suppress(OSError, KieloError):
            lease.check()
            settle(resolved, what, (state.step, state.tokens), hang.message, blamed_nodes=hang.blamed_nodes)
    if state is None or comes_again:
        note_refusal(hang)
    if REFUSAL_FILE not in os.environ:  # else what started this rank prints it
        print(f"kielo: {hang.message}", file=sys.stderr, flush=True)


def _run_folder(resolved: Resolved) -> Path:
    return Path(resolved.placement.train_folder).parent


def _how_to_go_on(run: Run, resolved: Resolved) -> str:
    step, newest = run.state.step, run.checkpoints.newest
    causes = "".join(f"; {cause}" for cause in Agreement().gather(run.stop.cause) if cause)
    return (
        f"stopped after step {step:,} of {resolved.identity.total_steps:,} and saved as {newest}{causes}; "
        "the same command goes on from there"
    )


def _fit_and_close(run: Run, resolved: Resolved) -> Ending:
    try:
        outcome = _fit_phases(run, resolved)
        Agreement().on_first(run.log.refuse_lost_rows)
        return outcome
    finally:
        run.checkpoints.close()
        run.profile.close()
        run.garbage.end()
        run.log.close()


def _fit_phases(run: Run, resolved: Resolved) -> Ending:
    """Train from the newest checkpoint through all phases, or until a signal: "finished" or "requeue".

    Raises KieloError when too many steps in a row were not finite, when the last checkpoint cannot be saved,
    and for an end that is not sound.
    """
    state, identity = run.state, resolved.identity
    restore(run)
    run.garbage.begin()
    run.log.start(state.step)
    run.meter.start(state.tokens)
    is_stopped = False
    while state.step < identity.total_steps and not is_stopped:
        run.time_limits.restart()
        settle_precision(run, resolved)
        steps = identity.next_steps(state.step + 1, state.spike_steps)
        if steps.is_skipped:
            is_stopped = _pass_over(run, identity, steps.phase_index, steps.last_step)
        else:
            last_step = next_check(run, identity.train.fp8, steps.last_step)
            with phase_parts(run, resolved, steps.phase_index, last_step) as phase:
                is_stopped = fit(run, phase)
            if not is_stopped and not go_back(run, resolved.identity.train.spikes):
                check_watched_change(run, resolved)
    run.time_limits.restart()
    # the last save must succeed; one before it that failed was reported and retried
    run.checkpoints.settle()
    if state.step < identity.total_steps:
        return "requeue"
    refuse_unsound_end(run)
    return "finished"


def _pass_over(run: Run, identity: Identity, index: int, last_step: int) -> bool:
    """Pass over the text up to `last_step`. Returns True on every rank if a signal came.

    The last step of a run ends with a score of the held-out text, also if it was passed over.
    """
    state, phase, tokens_before, first_step = (
        run.state,
        identity.phases[index],
        run.state.tokens,
        run.state.step + 1,
    )
    state.pass_over(last_step, phase.tokens_per_step, phase.sequences_per_step)
    run.meter.pass_over(tokens_before, state.tokens)
    is_asked = any(first <= first_step <= last for first, last in identity.train.skip_steps)
    reason = "skip_steps" if is_asked else "spike"
    run.log.write(passed_over_row(state, phase.number, first_step, reason))
    is_last = last_step == identity.total_steps
    if is_last:
        with run.meter.paused(), run.time_limits.paused("held-out text"):
            run.log.write(run.current.heldout.row(state))
    is_stopped = run.stop.agreed(last_step)
    if is_stopped or is_last:
        run.checkpoints.save(None)
    return is_stopped


def _note_failure(resolved: Resolved, error: Exception, state: State, is_first: bool, lease: Lease) -> None:
    """Records a failure. Any rank may be the only one that knows it; mostly all do: one file is enough."""
    if not is_first and (not isinstance(error, KieloError) or has_outcome(resolved)):
        return
    message = sentence(error) or f"{type(error).__name__}: {error}"
    # A full disk may be the very failure, which an error of this write must not replace; the same holds for a
    # job that took the folder over.
    with suppress(OSError, KieloError):
        lease.check()
        settle(resolved, "failed", (state.step, state.tokens), message)
