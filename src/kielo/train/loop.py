"""The training loop: one turn is one optimiser step, on any number of ranks.

Begin reading Kielo here. Every function called here is in the file of its name. `build.py` settled layout,
precision and launcher before the first turn. The host waits for the device only where a comment says so.
"""

from torch import Tensor

from kielo.train.feed import StepBatch
from kielo.train.parts import PhaseParts, Run, StepParts
from kielo.train.watch.checks import TakenStep


def fit(run: Run, phase: PhaseParts) -> bool:
    """Train until `phase.last_step`, a stop, or a reason to go back. Return True on every rank for a stop.

    Raises KieloError after too many bad steps or spikes in a row, or a second wrong value of one rank.
    """
    state = run.state
    while state.step < phase.last_step:
        state.advance(phase.tokens_per_step, phase.sequences_per_step)
        batch = phase.feed.take(state.step)
        learning_rate = run.learning_rate(state.tokens) * state.learning_rate_factor
        run.speed_watch.begin(state.step, run.current.layer_times)
        loss, gradient_norm = optimiser_step(run.current.step, batch, learning_rate)
        run.speed_watch.end(run.current.layer_times)
        current, own_loss = run.current, run.current.step.forward_backward.own_loss
        taken = TakenStep(state.step, loss, gradient_norm, own_loss, current.local_finite, current.replicas)
        if any(check.after_step(taken) == "go back" for check in run.checks):
            return False
        run.profile.step(state.step)
        run.time_limits.step_done(state.step)
        run.garbage.step(state.step)

        if run.log.due(state.step):  # the host waits for the device
            run.log.write(run.step_row(state, loss, gradient_norm, learning_rate))
        for periodic in (run.current.heldout, *run.current.periodic):
            if periodic.due(state.step):
                with run.meter.paused(), run.time_limits.paused(periodic.name):
                    run.log.write(periodic.row(state))
        with run.time_limits.progress.at_files():
            run.resources.look(state.step)
        stopping = run.stop.agreed(state.step)
        is_saving = stopping or run.stop.is_save_agreed or run.checkpoints.due(state.step)
        is_copying = not is_saving and run.checkpoints.is_copy_due(state.step)
        is_last = state.step == phase.last_step  # a change of precision can save after it
        is_kept = is_saving or is_copying or is_last
        if is_kept and run.replica_check.before_keeping(taken) == "go back":
            return False
        if is_saving:
            with run.meter.paused(), run.time_limits.paused("a save"):
                # the copy waits for the device, and writing continues beside the next steps
                run.checkpoints.save(loss)
                run.garbage.collect()
        if is_copying:
            with run.meter.paused(), run.time_limits.paused("a copy to memory"):
                run.checkpoints.copy_to_memory(loss)
        if stopping:
            return True
    return False


def optimiser_step(parts: StepParts, batch: StepBatch, learning_rate: float) -> tuple[Tensor, Tensor]:
    """Take one optimiser step. Return the loss and the gradient norm before clipping, both over all ranks.

    `kielo verify` and `kielo rehearse` call it too, so they check the same step.
    """
    loss = parts.forward_backward(batch)  # divided by the counted tokens of all ranks; gradients are sums
    for on_gradients in parts.on_gradients:
        on_gradients(batch)
    gradient_norm = parts.clip()
    skip = parts.guard.check(loss, gradient_norm)  # stays on the device, where the optimiser reads it
    parts.optimiser.step(learning_rate, skip)
    parts.optimiser.zero_grad()
    return loss, gradient_norm
