"""Going back inside a job: restores the checkpoint that a check has chosen, and goes on from there.

The steps to pass over for a spike become a part of the run's state, and are saved at once in the checkpoint
that the run went back to, so that any later attempt, on any number of ranks, passes over the same.
"""

from kielo.recipe.sections import Spikes
from kielo.train.build import restore
from kielo.train.parts import Run
from kielo.train.watch.spikes import WentBack, steps_to_pass_over


def go_back(run: Run, settings: Spikes) -> bool:
    """Go back if a check asked for it. All ranks call it together; returns the same on each."""
    return _go_back_for_spike(run, settings) or _go_back_for_difference(run)


def _go_back_for_spike(run: Run, settings: Spikes) -> bool:
    episode, run.spike_watch.harmful = run.spike_watch.harmful, None
    if episode is None:
        return False
    state, factor = run.state, settings.learning_rate_factor
    first_step, last_step = steps_to_pass_over(episode)
    with run.meter.paused():
        _restore(run)
        state.spikes.append(WentBack(first_step, last_step, factor))
        last = run.guard.last(1)
        run.checkpoints.save(last[0][0] if last else None)
    run.log.write(run.spike_watch.row(episode, state.step, "went back"))
    lower = f", and the learning rate is {factor:g} of what it was from there on" if factor < 1 else ""
    run.alert(
        state.step,
        f"{run.spike_watch.described(episode)}; the run went back to step {state.step}, and steps "
        f"{first_step} to {last_step} are passed over{lower}",
    )
    return True


def _go_back_for_difference(run: Run) -> bool:
    found, run.replica_check.found = run.replica_check.found, ""
    if not found:
        return False
    step = run.state.step
    with run.meter.paused():
        _restore(run)
    run.alert(step, f"{found}; the run went back to step {run.state.step}")
    return True


def _restore(run: Run) -> None:
    """Restore the newest checkpoint; figures and rows of the steps after it are discarded."""
    state, refused = run.state, run.state.refused_changes
    restore(run)
    state.refused_changes = refused  # a change of precision that did harm once is not tried again
    run.meter.go_back(state.tokens)
    run.log.go_back(state.step)
