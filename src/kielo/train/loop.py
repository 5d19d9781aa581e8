"""The training loop: one turn is one optimiser step over the recipe's tokens per step, on any number of ranks.

Begin reading Kielo here; whatever this page calls stands in the file of its name. How the model lies on the ranks, in
which precision it computes and what started the process were all decided in `build.py`, before the first turn.
A turn makes the host wait for the device only where it says so.
"""

from kielo.train.build import Run


def fit(run: Run) -> str:
    """Train until the last step, or until a signal. Returns "finished" or "requeue", the same on every rank.

    Raises KieloError when too many steps in a row were not finite.
    """
    state = run.state
    run.checkpoints.restore()  # from the newest one; without any, the first weights stay
    run.log.start(state.step)
    run.meter.start(state.tokens)

    while state.step < run.total_steps:
        state.advance(run.tokens_per_step, run.sequences_per_step)
        batch = run.feed.take(state.step)
        loss = run.forward_backward(batch)  # divided by the counted tokens of all ranks; gradients are sums
        gradient_norm = run.clip()  # over all ranks, as it was before clipping
        skip = run.guard.check(loss, gradient_norm)  # stays on the device, where the optimiser reads it
        learning_rate = run.learning_rate(state.step)
        run.optimiser.step(learning_rate, skip)
        run.optimiser.zero_grad()
        run.guard.stop_if_diverged(state.step)

        if run.log.due(state.step):  # the host waits for the device
            run.log.write(run.step_row(state, loss, gradient_norm, learning_rate))
        if run.heldout.due(state.step):
            with run.meter.paused():
                run.log.write(run.heldout.row(state))
        stopping = run.stop.agreed(state.step)
        if stopping or run.checkpoints.due(state.step):
            with run.meter.paused():
                run.checkpoints.save()
        if stopping:
            break

    return "finished" if state.step == run.total_steps else "requeue"
