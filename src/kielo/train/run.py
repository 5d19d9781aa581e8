"""The training stage on one rank: a resolved run → checkpoints, metrics, `outcome.json` and a manifest."""

import faulthandler
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from kielo.artifact.attempt_files import (
    ALERTS_NAME,
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
from kielo.checkpoint.remote_copies import RemoteCopies
from kielo.parallel.mesh import alike_communicators, communicators
from kielo.ranks.hang_watch import Progress, silent_seconds
from kielo.ranks.heartbeat import Heartbeat
from kielo.ranks.rendezvous import find_rendezvous
from kielo.ranks.world import World, end_world, leave_together, start_world
from kielo.recipe.errors import KieloError, sentence
from kielo.recipe.sections import Spikes
from kielo.resolve.resolved import Identity, Resolved, filled
from kielo.train import records
from kielo.train.build import assemble, phase_parts, restore
from kielo.train.loop import fit
from kielo.train.meter import passed_over_row
from kielo.train.parts import Asked, MakePeriodic, Run
from kielo.train.precision import determinism
from kielo.train.precision_change import check_watched_change, next_check, settle_precision
from kielo.train.signals import Triggers
from kielo.train.start_checks import TokenCheck, check_tokenizer, refuse_unlike_ranks
from kielo.train.state import State, note_alert
from kielo.train.stop import Stop, StoppedBeforeTraining
from kielo.train.watch.checks import refuse_unsound_loss, refuse_unsound_weights
from kielo.train.watch.spikes import Episode, WentBack, steps_to_pass_over


def train(
    resolved: Resolved,
    max_steps: int | None = None,
    profile_steps: int = 0,
    ready: Callable[[], None] = lambda: None,
    periodic: tuple[MakePeriodic, ...] = (),
) -> Outcome:
    """Start or continue the run. Called on every rank, and returns the same outcome on each.

    The outcome is "finished" (exit code 0), or "requeue" (75) for a run that was stopped by a signal or at
    step `max_steps`, saved, and must be started again. A finished run is left unchanged. An error is recorded
    as "failed" and raised. A refusal before training begins (KieloError: another job works in the folder,
    another identity, altered tokens, `ready`) leaves no record. From the third step on `profile_steps` are
    recorded. ready, periodic: see `Asked`.
    """
    is_first = find_rendezvous().rank == 0
    copies, placement = None, resolved.placement
    if is_first and placement.checkpoint.copy_to:
        folder = Path(placement.train_folder)
        alert = partial(note_alert, folder / ALERTS_NAME)
        copies = RemoteCopies(folder / "checkpoints", placement.checkpoint.copy_to, alert)
    if records.is_finished(resolved):
        outcome = records.nothing_to_do(resolved, is_first)
    else:
        asked = Asked(profile_steps, ready=ready, periodic=periodic, copies=copies)
        outcome = _trained(resolved, max_steps, asked)
    if copies is not None and outcome.outcome == "finished":  # the other ranks have left
        copies.finish(resolved.identity.total_steps)
    return outcome


def _trained(resolved: Resolved, max_steps: int | None, asked: Asked) -> Outcome:
    is_first = find_rendezvous().rank == 0
    triggers = Triggers(_run_folder(resolved))
    triggers.refuse_start()
    return _started(resolved, Stop(max_steps, is_first, triggers if is_first else None), asked)


def measure(resolved: Resolved, steps: int, profile_steps: int = 0) -> Outcome:
    """Measure the speed of the first `steps` steps that the recipe does not skip, without saving.

    Called on every rank. `resolved.toml`, log and `outcome.json` are written as for an attempt. Raises
    KieloError in the folder of a run that has trained, and for more steps than the run has.
    """
    folder, identity, first = _run_folder(resolved), resolved.identity, 1
    if has_trained(folder):
        raise KieloError(
            f"{folder}: contains a trained run, and its log is not for measurements. Fix: another folder, "
            "for example by kielo launch RECIPE --ladder 1"
        )
    while (skipped := identity.next_steps(first)).is_skipped:
        first = skipped.last_step + 1
    last = first + steps - 1
    if last > identity.total_steps:
        left = identity.total_steps - first + 1
        raise KieloError(f"--measure {steps}: only {left} steps of the run are left. Fix: --measure {left}")
    is_first = find_rendezvous().rank == 0
    return _started(resolved, Stop(last, is_first), Asked(profile_steps, is_saving=False))


def _started(resolved: Resolved, stop: Stop, asked: Asked) -> Outcome:
    if not faulthandler.is_enabled():
        faulthandler.enable()  # so that a rank that a library aborts writes its stack
    with determinism(resolved.placement.train.deterministic), stop:
        try:
            timeout_seconds = filled(resolved.placement.train.start_timeout_seconds)
            world = start_world(timeout_seconds, resolved.placement.device)
            with ExitStack() as until_the_end:
                folder = _run_folder(resolved)
                lease = Agreement().on_first(lambda: until_the_end.enter_context(held(folder)))
                outcome = _attempt(resolved, world, stop, lease, asked)
            leave_together(resolved.placement.train.step_timeout_seconds)
            return outcome
        except StoppedBeforeTraining:
            return stopped_before_training()
        finally:
            end_world()


def _attempt(resolved: Resolved, world: World, stop: Stop, lease: Lease, asked: Asked) -> Outcome:
    is_first, state, has_begun, is_saving = world.rank == 0, State(), False, asked.is_saving
    refuse_unlike_ranks(resolved, Agreement())
    asked.ready()
    if is_saving:  # before the records that mention them are touched
        Agreement().on_first(lambda: records.refuse_lost_checkpoints(resolved))
    progress = _progress(resolved, world)

    def note_hang(message: str, recurs: bool, nodes: Sequence[str]) -> None:
        hang = Refusal(message=message, blamed_nodes=list(nodes))
        _note_hang(resolved, hang, recurs, state if has_begun else None, lease)

    stacks = Path(resolved.placement.train_folder) / "stacks"
    try:
        with Heartbeat(world, progress, stacks, note_hang) as heartbeat:
            with TokenCheck(resolved, Agreement()) as tokens:  # reads them while the model is built
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
                records.note_beginning(resolved, run.checkpoints.newest_step or 0, hosts)
            if is_first:
                records.forget_outcome(resolved)
                records.write_plan(resolved)
                records.withdraw_manifest(resolved)
            outcome = _fit_and_close(run, resolved)
        if not is_saving:
            outcome = "finished" if stop.is_at_limit(state.step) else "requeue"
            message = f"nothing was saved after step {state.step:,}"
            return records.settle(resolved, outcome, (state.step, state.tokens), message, is_writing=is_first)
        if is_first:
            lease.check()
            if outcome == "finished":
                records.write_train_manifest(resolved, filled(run.checkpoints.newest))
        message = ""
        if outcome != "finished":
            causes = "".join(f". {cause}" for cause in Agreement().gather(run.stop.cause) if cause)
            message = (
                f"stopped after step {state.step:,} of {resolved.identity.total_steps:,} and saved as "
                f"{run.checkpoints.newest}{causes}. The same command resumes from there"
            )
        return records.settle(resolved, outcome, (state.step, state.tokens), message, is_writing=is_first)
    except Exception as error:
        if has_begun or not isinstance(error, KieloError):
            _note_failure(resolved, error, state, is_first, lease)
        raise


def _progress(resolved: Resolved, world: World) -> Progress:
    train = resolved.placement.train
    # Nobody waits for a single rank, and no other rank can find that it is stuck.
    floor = train.hang_seconds if world.size > 1 else max(train.hang_seconds, train.step_timeout_seconds)
    silent, files = silent_seconds(floor, world.size), resolved.placement.file_stall_seconds
    return Progress(floor, silent, filled(train.start_timeout_seconds), train.step_timeout_seconds, files)


def _note_hang(resolved: Resolved, hang: Refusal, recurs: bool, state: State | None, lease: Lease) -> None:
    """Record a hang, on one rank. A hang that recurs is a failure. `state` is None before training."""
    if state is not None:
        what: Ending = "failed" if recurs else "hung"
        with suppress(OSError, KieloError):
            lease.check()
            records.settle(
                resolved, what, (state.step, state.tokens), hang.message, blamed_nodes=hang.blamed_nodes
            )
    if state is None or recurs:
        note_refusal(hang)
    if REFUSAL_FILE not in os.environ:  # else the process that started this rank prints it
        print(f"kielo: {hang.message}", file=sys.stderr, flush=True)


def _run_folder(resolved: Resolved) -> Path:
    return Path(resolved.placement.train_folder).parent


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
    """Train through all phases, or until a signal: "finished" or "requeue".

    Raises KieloError after too many bad steps in a row, for a failed last save, and for an unsound end.
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
        if _write_owed_rows(run):
            break
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
    # the last save must succeed; an earlier failed save was logged and retried
    run.checkpoints.settle()
    if state.step < identity.total_steps:
        return "requeue"
    refuse_unsound_weights(run.current.model, run.device)
    refuse_unsound_loss(state.step, run.current.heldout.loss_at(state))
    return "finished"


def _write_owed_rows(run: Run) -> bool:
    """Write the rows of this step that a stop has left out. Return True on all ranks for another stop."""
    for periodic in run.current.periodic:
        if periodic.is_owed(run.state.step):
            with run.meter.paused(), run.time_limits.paused(periodic.name):
                run.log.write(periodic.row(run.state))
    return run.stop.is_settled


def _pass_over(run: Run, identity: Identity, index: int, last_step: int) -> bool:
    """Pass over the text up to `last_step`. Return True after a signal."""
    state, phase = run.state, identity.phases[index]
    tokens_before, first_step = state.tokens, state.step + 1
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


def go_back(run: Run, settings: Spikes) -> bool:
    """Go back to the checkpoint that a check has chosen. Return False on all ranks if no check asked for it.

    The steps to pass over for a spike are saved at once, in the checkpoint that the run went back to, so that
    any later attempt passes over the same steps.
    """
    episode, run.spike_watch.harmful = run.spike_watch.harmful, None
    if episode is not None:
        _go_back_for_spike(run, episode, settings.learning_rate_factor)
        return True
    found, run.replica_check.found = run.replica_check.found, ""
    if found:
        step = run.state.step
        with run.meter.paused():
            _restore_earlier(run)
        run.alert(step, f"{found}. The run went back to step {run.state.step}")
    return bool(found)


def _go_back_for_spike(run: Run, episode: Episode, factor: float) -> None:
    state, (first_step, last_step) = run.state, steps_to_pass_over(episode)
    with run.meter.paused():
        _restore_earlier(run)
        state.spikes.append(WentBack(first_step, last_step, factor))
        last = run.guard.last(1)
        run.checkpoints.save(last[0][0] if last else None)
    run.log.write(run.spike_watch.row(episode, state.step, "went back"))
    lower = f" with {factor:g} of the learning rate" if factor < 1 else ""
    run.alert(
        state.step,
        f"{run.spike_watch.described(episode)}. The run went back to step {state.step}, passes over steps "
        f"{first_step} to {last_step}, and continues{lower}",
    )


def _restore_earlier(run: Run) -> None:
    """Restore the newest checkpoint. Figures and rows of the steps after it are discarded."""
    state, refused = run.state, run.state.refused_changes
    restore(run)
    state.refused_changes = refused  # a harmful change of precision is not tried again
    run.meter.go_back(state.tokens)
    run.log.go_back(state.step)


def _note_failure(resolved: Resolved, error: Exception, state: State, is_first: bool, lease: Lease) -> None:
    """Record a failure, on rank 0, or on any rank if it may be the only rank that knows it."""
    if not is_first and (not isinstance(error, KieloError) or records.has_outcome(resolved)):
        return
    message = sentence(error) or f"{type(error).__name__}: {error}"
    # A full disk may be the failure itself, and another job may have taken the folder over. An error of this
    # write must not replace the failure.
    with suppress(OSError, KieloError):
        lease.check()
        records.settle(resolved, "failed", (state.step, state.tokens), message)
