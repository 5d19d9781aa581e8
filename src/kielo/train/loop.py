"""The training loop: one turn is one optimiser step over the recipe's tokens per step, on any number of
ranks.

Begin reading Kielo here; whatever this page calls stands in the file of its name. How the model lies on the
ranks, in which precision it computes and what started the process were all decided in `build.py`, before the
first turn. A turn makes the host wait for the device only where it says so.
"""

from kielo.train.build import Run


def fit(run: Run) -> bool:
    """Train until `run.last_step`, or until a signal: whether there was one, the same on every rank.

    Raises KieloError when too many steps in a row were not finite.
    """
    state = run.state
    while state.step < run.last_step:
        state.advance(run.tokens_per_step, run.sequences_per_step)
        batch = run.feed.take(state.step)
        loss = run.forward_backward(batch)  # divided by the counted tokens of all ranks; gradients are sums
        gradient_norm = run.clip()  # over all ranks, as it was before clipping
        skip = run.guard.check(loss, gradient_norm)  # stays on the device, where the optimiser reads it
        learning_rate = run.learning_rate(state.tokens)
        run.optimiser.step(learning_rate, skip)
        run.optimiser.zero_grad()
        run.guard.stop_if_diverged(state.step, run.checkpoints.way_on)
        run.profile.step(state.step)

        if run.log.due(state.step):  # the host waits for the device
            run.log.write(run.step_row(state, loss, gradient_norm, learning_rate))
        if run.heldout.due(state.step):
            with run.meter.paused():
                run.log.write(run.heldout.row(state))
        stopping = run.stop.agreed(state.step)
        if stopping or run.checkpoints.due(state.step):
            with run.meter.paused():
                # the copy waits for the device; writing goes on beside the next steps
                run.checkpoints.save(loss)
        if stopping:
            return True
    return False
