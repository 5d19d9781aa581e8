"""A change of precision, or of the trained modules: save, rebuild, restore. A change to fp8 is watched.

Modules cannot be swapped under FSDP2 or a compiler, so a change goes through a checkpoint inside the job.
After a change to fp8 the mean loss and gradient norm of every ten steps are compared with the steps before
it. If one has risen too far, the run goes back to the checkpoint at the change and continues in the old
precision.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from kielo.artifact.metrics import PrecisionChange, PrecisionVerdict
from kielo.recipe.sections import Fp8
from kielo.resolve.resolved import Resolved
from kielo.train.build import compute_in, restore
from kielo.train.parts import Run
from kielo.train.precision import change_before, next_precision
from kielo.train.state import PrecisionSince, WatchedChange

CHECK_EVERY_STEPS = 10  # the loss of a single step is too noisy


def settle_precision(run: Run, resolved: Resolved) -> None:
    """Change to the precision and trained modules of the next step. All ranks call it together."""
    state, identity, wanted = run.state, resolved.identity, next_precision(resolved.identity, run.state)
    trainable = identity.phases[identity.phase_index(state.step + 1)].trainable
    if (wanted, trainable) != (run.current.precision, run.current.trainable):
        with run.meter.paused():
            _save_here(run)
            compute_in(run, resolved, wanted)
            restore(run)
    run.checkpoints.note_trainable(run.current.trainable)
    if state.precisions and state.precisions[-1].precision == run.current.precision:
        return
    is_change = bool(state.precisions)
    state.precisions.append(PrecisionSince(state.step + 1, run.current.precision))
    state.watch = None
    if is_change:
        run.log.write(PrecisionChange(step=state.step, tokens=state.tokens, precision=run.current.precision))
        _begin_watch(run, identity.train.fp8)


def next_check(run: Run, fp8: Fp8, last_step: int) -> int:
    """Return the step after which `check_watched_change` must be called next, at most `last_step`."""
    watch = run.state.watch
    if watch is None:
        return last_step
    done = run.state.step - watch.first_step + 1
    next_done = min((done // CHECK_EVERY_STEPS + 1) * CHECK_EVERY_STEPS, fp8.watch_steps)
    return min(last_step, watch.first_step - 1 + next_done)


def check_watched_change(run: Run, resolved: Resolved) -> None:
    """Judge a watched change, and take it back if it did harm. All ranks call it together."""
    state, watch, fp8 = run.state, run.state.watch, resolved.identity.train.fp8
    if watch is None:
        return
    done = state.step - watch.first_step + 1
    if done < fp8.watch_steps and done % CHECK_EVERY_STEPS:
        return
    if rows := run.guard.last(min(CHECK_EVERY_STEPS, done)):
        loss, norm = _means(rows)
        state.watch = watch = replace(
            watch,
            loss_rise=_larger(watch.loss_rise, loss / watch.loss - 1),
            gradient_norm_rise=_larger(watch.gradient_norm_rise, norm / watch.gradient_norm - 1),
        )
    if watch.loss_rise > fp8.max_loss_rise or watch.gradient_norm_rise > fp8.max_gradient_norm_rise:
        _take_back(run, resolved, _verdict(run, watch, "taken back"))
    elif done >= fp8.watch_steps:
        run.log.write(_verdict(run, watch, "kept"))
        state.watch = None


def _begin_watch(run: Run, fp8: Fp8) -> None:
    rows = run.guard.last(fp8.watch_steps)
    before = [row for row in rows if all(math.isfinite(value) and value > 0 for value in row)]
    if run.current.precision != "fp8" or not before:
        return
    loss, norm = _means(before)
    run.state.watch = WatchedChange(run.state.step + 1, loss, norm, loss_rise=-1.0, gradient_norm_rise=-1.0)


def _take_back(run: Run, resolved: Resolved, verdict: PrecisionVerdict) -> None:
    """Rebuild the model in the old precision, at the checkpoint of the change or else here."""
    state, identity = run.state, resolved.identity
    first_step, fp8 = verdict.precision_from, identity.train.fp8
    asked_from, _ = change_before(identity, first_step, state.refused_changes)
    refused = [*state.refused_changes, asked_from]
    with run.meter.paused():
        if not run.checkpoints.go_back_to(first_step - 1):
            _save_here(run)
        _, precision = change_before(identity, first_step, refused)
        compute_in(run, resolved, precision)
        restore(run)
    state.refused_changes, state.watch = refused, None
    run.meter.go_back(state.tokens)
    run.log.go_back(state.step)
    run.log.write(verdict.model_copy(update={"step": state.step, "tokens": state.tokens}))
    run.alert(
        state.step,
        f"fp8 from step {first_step} on made the loss rise by {verdict.loss_rise:.1%} and the gradient "
        f"norm by {verdict.gradient_norm_rise:.0%} (train.fp8.max_loss_rise = {fp8.max_loss_rise}, "
        f"max_gradient_norm_rise = {fp8.max_gradient_norm_rise}), so the run continues in {precision} after "
        f'step {state.step}. Fix: train.fp8.scaling = "rowwise", more in train.fp8.kept_in_bf16, or a later '
        "change",
    )


def _save_here(run: Run) -> None:
    run.checkpoints.settle()
    if run.state.step and run.checkpoints.newest_step != run.state.step:
        last = run.guard.last(1)
        run.checkpoints.save(last[0][0] if last else None)
        run.checkpoints.settle()


def _verdict(run: Run, watch: WatchedChange, outcome: str) -> PrecisionVerdict:
    return PrecisionVerdict(
        step=run.state.step,
        tokens=run.state.tokens,
        precision=run.current.precision,
        precision_from=watch.first_step,
        outcome=outcome,
        loss_rise=watch.loss_rise,
        gradient_norm_rise=watch.gradient_norm_rise,
    )


def _means(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return fmean(loss for loss, _ in rows), fmean(norm for _, norm in rows)


def _larger(a: float, b: float) -> float:
    return math.inf if math.isnan(b) else max(a, b)  # `max` alone may ignore a NaN
