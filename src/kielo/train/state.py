"""The state of a run, and its checkpoints.

A checkpoint holds the weights, both moments, the number of updates, step, tokens and samples (all that the
data order needs), the steps that were passed over, the precision of each range of steps, the guard's counts,
the step's loss and the identity of the run. Nothing in it depends on the layout, so any number of ranks
restores it. On the same number the run ends with bitwise the weights of one that was never stopped: always on
CPUs, on GPUs with train.deterministic.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from kielo.artifact.attempt_files import append_alert
from kielo.artifact.checkpoint_folder import step_folder_name, step_folders, step_of
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.parallel.materialise import local
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Precision
from kielo.resolve.planned_phases import first_difference, merged, trains
from kielo.resolve.resolve import consent
from kielo.resolve.resolved import Resolved, read_identity, stored_identity
from kielo.train.optimiser import Optimiser
from kielo.train.watch.guard import Guard, GuardState
from kielo.train.watch.spikes import Spikes, WentBack, steps_to_pass_over

logger = logging.getLogger(__name__)


class StepSpan(NamedTuple):
    """Steps `first` to `last`."""

    first: int
    last: int


class PrecisionSince(NamedTuple):
    """The precision of the steps from `first_step` on."""

    first_step: int
    precision: Precision


class TrainedSince(NamedTuple):
    """The modules that are trained after so many updates of the run; none for all."""

    updates: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class WatchedChange:
    """A change of precision under watch: usual values before it, and the highest relative rises since."""

    first_step: int
    loss: float
    gradient_norm: float
    loss_rise: float
    gradient_norm_rise: float


@dataclass(frozen=True)
class Trouble:
    """The steps of two saves: the last before steps that were not finite, and the last that followed one."""

    sound_step: int
    unsound_step: int


@dataclass
class State:
    """The steps, tokens and samples done; those of a skipped step count too.

    skipped_steps: what the recipe passed over so far. refused_changes: first steps of the recipe's changes of
    precision that were taken back. watch: see `precision_change.py`. trouble: None if no step was not finite,
    or if enough sound steps have followed. spikes: in the order in which the run went back. trained: empty if
    all steps train all modules.
    """

    step: int = 0
    tokens: int = 0
    samples: int = 0
    skipped_steps: list[StepSpan] = field(default_factory=list)
    precisions: list[PrecisionSince] = field(default_factory=list)
    refused_changes: list[int] = field(default_factory=list)
    watch: WatchedChange | None = None
    trouble: Trouble | None = None
    spikes: list[WentBack] = field(default_factory=list)
    trained: list[TrainedSince] = field(default_factory=list)

    @property
    def spike_steps(self) -> list[tuple[int, int]]:
        """The ranges [first, last] that are passed over for spikes; they may be to come, and may overlap."""
        return [(spike.first_step, spike.last_step) for spike in self.spikes]

    @property
    def learning_rate_factor(self) -> float:
        """The factor of the recipe's learning rate in this step."""
        return math.prod(spike.learning_rate_factor for spike in self.spikes if spike.first_step <= self.step)

    def advance(self, tokens_per_step: int, sequences_per_step: int) -> None:
        self.step += 1
        self.tokens += tokens_per_step
        self.samples += sequences_per_step

    def pass_over(self, last_step: int, tokens_per_step: int, sequences_per_step: int) -> None:
        """Advance to `last_step` by steps of one size that are not trained on."""
        first_step = self.step + 1
        while self.step < last_step:
            self.advance(tokens_per_step, sequences_per_step)
        if self.skipped_steps and self.skipped_steps[-1].last == first_step - 1:
            first_step = self.skipped_steps.pop().first
        self.skipped_steps.append(StepSpan(first_step, last_step))

    def begun(self, is_trained: Callable[[Sequence[str]], bool]) -> int | None:
        """Return the updates of the run before a parameter's own first one; None for one that is frozen.

        is_trained: modules → True if the parameter is among them. One that was frozen in between began anew.
        """
        begins = None
        for first, modules in reversed(self.trained or [TrainedSince(0, ())]):
            if not is_trained(modules):
                break
            begins = first
        return begins

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Take over a checkpoint's plain state.

        Fields that older versions lacked keep their first value; what older versions stored besides is lost.
        """
        watch, trouble = plain.get("watch"), plain.get("trouble")
        known = {name: plain[name] for name in vars(self) if name in plain} | {
            "skipped_steps": [StepSpan(*span) for span in plain.get("skipped_steps", [])],
            "precisions": [PrecisionSince(*since) for since in plain.get("precisions", [])],
            "watch": None if watch is None else WatchedChange(**watch),
            "trouble": None if trouble is None else Trouble(**trouble),
            "spikes": [WentBack(**spike) for spike in plain.get("spikes", [])],
            "trained": [TrainedSince(updates, tuple(of)) for updates, of in plain.get("trained", [])],
        }
        vars(self).update(vars(State(**known)))


class RunCheckpoints:
    """Save and restore the parts of a run that change. All ranks call each method together."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        resolved: Resolved,
        guard: Guard,
        spikes: Spikes,
        state: State,
        is_saving: bool = True,
    ):
        """Find the newest whole checkpoint, before a model is built that it would not fit.

        is_saving: False where the run is only measured; then no checkpoint is saved.
        Raises KieloError, naming the keys, where it is of a run with another identity.
        """
        self._checkpointer = checkpointer
        self._resolved = resolved
        self._guard, self._spikes, self._state = guard, spikes, state
        self._is_saving = is_saving
        self._last_save = (0, 0)  # its step, and how many steps had not been finite by then
        self._is_due = False
        self.newest: Path | None = checkpointer.newest()
        self.found = State()  # what the run goes on from
        if self.newest is not None:
            plain = checkpointer.plain(self.newest)
            self.found.restore(plain)
            consent(read_identity(plain["identity"], self.newest), resolved, self.found.step)
            self._refuse_other_skips(self.newest, self.found)

    def track(
        self,
        parameters: Mapping[str, Tensor],
        optimiser: Optimiser,
        source_tensors: Mapping[str, str] | None = None,
        source_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Register the tensors to save and reserves host memory for their copies.

        parameters: our name → DTensor. source_tensors: the names and dtypes of the tensors that the run's
        first weights came from; source_settings: what `read_settings` read beside them. An export uses both.
        """
        self._optimiser = optimiser
        self._source_tensors = dict(source_tensors or {})
        self._source_settings: dict[str, Any] | None = dict(source_settings or {})
        self._tensors: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in parameters.items()}
        self._tensors |= {f"optimiser/{name}": tensor for name, tensor in optimiser.moments().items()}
        if self._is_saving:
            self._checkpointer.reserve(self._tensors)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of `track`, by their names in a checkpoint."""
        return dict(self._tensors)

    def forget(self) -> None:
        """Drop the tensors and the optimiser of `track`, so that their memory can be freed."""
        del self._optimiser
        self._tensors = {}

    def due(self, step: int) -> bool:
        """Return True if a checkpoint must be saved after `step`. Called after every step.

        None is saved while a change of precision is watched, which may lead back to the checkpoint before it,
        nor in a spike, nor after a step that was not finite: then after the next sound one.
        """
        if not self._is_saving:
            return False
        if step == self._resolved.identity.total_steps:
            return True
        if step % self._resolved.placement.checkpoint.every_steps == 0 and self._state.watch is None:
            self._is_due = True
        return self._is_due and self._may_save()

    def is_copy_due(self, step: int) -> bool:
        """Return True if the state must be copied to the nodes' memory after `step`; where none is saved."""
        every_steps = self._resolved.placement.checkpoint.memory_every_steps
        if not self._is_saving or not every_steps or step % every_steps or self._state.watch is not None:
            return False
        return self._may_save()

    def _may_save(self) -> bool:
        return self._spikes.episode is None and not self._guard.bad_in_a_row

    def shortage(self) -> str | None:
        """Return, on rank 0, why the disk has no room for the next save; None if it has."""
        return self._checkpointer.shortage() if self._is_saving else None

    @property
    def newest_step(self) -> int | None:
        return None if self.newest is None else step_of(self.newest)

    def save(self, loss: Tensor | float | None) -> None:
        """Copie the state to the host and starts to write it while training goes on.

        A save that fails is reported and retried when the next is due. loss: of this step, over all ranks,
        for people who look at checkpoints; None where the step was passed over. Of a step in which no label
        counted none is stored.

        The newest checkpoint from before steps that were not finite is kept until `checkpoint.every_steps`
        sound ones have followed; a save right after such a step (a signal, the last step) removes no other.
        """
        if not self._is_saving:
            return
        guard = self._guard.state()
        self._state.trouble = self._trouble(guard.skipped)
        self._last_save = (self._state.step, guard.skipped)
        plain = self._plain(guard, loss)
        self._is_due = False
        trouble, keep_all = self._state.trouble, None
        if guard.in_a_row:
            keep_all = (
                f"the last {guard.in_a_row} steps were not finite, so no older checkpoint was removed for "
                f"{step_folder_name(self._state.step)}; where training fails from there, move it away to go "
                "on from an older one"
            )
        sound_steps = [trouble.sound_step] if trouble else []
        if self._spikes.episode is not None:
            sound_steps.append(steps_to_pass_over(self._spikes.episode)[0] - 1)
        self._checkpointer.save(
            self._state.step, self._tensors, plain, min(sound_steps, default=None), keep_all
        )

    def copy_to_memory(self, loss: Tensor) -> None:
        """Copie the state to the host, and from there to the nodes' memory while training goes on."""
        guard = self._guard.state()
        trouble = self._trouble(guard.skipped)
        plain = self._plain(guard, loss) | {"trouble": None if trouble is None else asdict(trouble)}
        self._checkpointer.copy_to_memory(self._state.step, self._tensors, plain)

    def _plain(self, guard: GuardState, loss: Tensor | float | None) -> dict[str, Any]:
        # The guard remembers no step without a label. Both wait for the device, as the copy does.
        settled_loss = math.nan if loss is None or not self._guard.last(1) else float(loss)
        return asdict(self._state) | {
            "loss": settled_loss if math.isfinite(settled_loss) else None,
            "optimiser_updates": self._optimiser.updates,
            "guard": asdict(guard),
            "spike_watch": self._spikes.plain_state(),
            "identity": stored_identity(self._resolved.identity),
            "source_tensors": self._source_tensors,
            "source_settings": self._source_settings,
            "tokenizer_hash": self._resolved.placement.tokenizer_hash,
        }

    def _trouble(self, skipped: int) -> Trouble | None:
        """Return `trouble` as of this step. skipped: steps that were not finite, since step 1."""
        state, (last_step, skipped_before) = self._state, self._last_save
        if skipped > skipped_before:
            return Trouble(state.trouble.sound_step if state.trouble else last_step, state.step)
        every_steps = self._resolved.placement.checkpoint.every_steps
        if state.trouble and state.step - state.trouble.unsound_step >= every_steps:
            return None
        return state.trouble

    def way_on(self, first_bad_step: int) -> str:
        """Return a sentence: how to go on with a run that ends because of bad steps since `first_bad_step`.

        The checkpoint of the step just before is suspect: that step's own update may have spoilt the weights.
        """
        with suppress(KieloError):  # reported already
            self._checkpointer.settle()
        folder = self._checkpointer.folder
        try:
            names, suspects = _split_names(folder, first_bad_step - 1)
        except KieloError as error:
            return f"{error}. "
        sound = names[0] if names else None
        if sound is None and not suspects:
            return f"No checkpoint had been saved before step {first_bad_step}. "
        if sound is None:
            return (
                f"No sound step followed the only checkpoint in {folder}, {suspects[0]}, so its weights may "
                "be spoilt. "
            )
        if not suspects:
            return (
                f"{sound} is the newest checkpoint, from before the first of them, step {first_bad_step}; "
                "the same command goes on from it. "
            )
        return (
            f"{sound} is the newest checkpoint that a sound step followed, before the first bad one, step "
            f"{first_bad_step}; move {', '.join(suspects)} out of {folder}, and the same command goes on "
            "from it. "
        )

    def settle(self) -> None:
        """Wait for the last save. Raises KieloError if it failed, as no later save can replace it."""
        self.newest = self._checkpointer.settle() or self.newest

    def close(self) -> None:
        """Let a save in progress finish, also when training has failed."""
        self._checkpointer.close()

    def restore(self) -> None:
        """Restore the newest checkpoint. Without one, the initial weights and step 0 stay.

        Parameters that it has no moments of, as they were frozen, begin with moments of 0.
        """
        if self.newest is None:
            return
        plain, stored = self._checkpointer.plain(self.newest), State()
        stored.restore(plain)
        updates = plain["optimiser_updates"]
        begun = {name: stored.begun(partial(self._is_trained, name)) for name in self._optimiser.parameters}
        frozen = [name for name, first in begun.items() if first is None]
        new = {f"optimiser/{name}/{moment}" for name in frozen for moment in self._optimiser.moment_names}
        tensors = {name: tensor for name, tensor in self._tensors.items() if name not in new}
        self._checkpointer.restore(self.newest, tensors)
        for name in new:
            local(self._tensors[name]).zero_()
        self._optimiser.resume(
            updates, {name: updates if first is None else first for name, first in begun.items()}
        )
        guard = GuardState.read(plain["guard"])
        self._guard.restore(guard)
        self._spikes.restore(plain.get("spike_watch", {}))
        self._source_tensors = plain["source_tensors"]
        self._source_settings = plain.get("source_settings")  # None: of a version that kept none
        spikes = self._state.spikes  # those that the run goes back for are no part of an earlier checkpoint
        self._state.restore(plain)
        self._state.spikes = max(spikes, self._state.spikes, key=len)
        self._last_save, self._is_due = (self._state.step, guard.skipped), False

    def note_trainable(self, modules: Sequence[str]) -> None:
        """Note the modules that the steps from here on train, none for all, if they are others than before.

        A change of precision is no longer watched then: gradient norms are those of other parameters.
        """
        state = self._state
        before = state.trained or [TrainedSince(0, ())]
        if tuple(modules) == before[-1].modules:
            return
        entry = TrainedSince(self._optimiser.updates, tuple(modules))
        state.trained = [*before, entry] if state.step else [entry]
        state.watch = None

    def _is_trained(self, name: str, modules: Sequence[str]) -> bool:
        return trains(self._resolved.identity.model, modules, name)

    def go_back_to(self, step: int) -> bool:
        """Make this step's checkpoint the newest, removing later ones. Returns False if there is none."""
        found = self._checkpointer.go_back_to(step)
        self.newest = found or self.newest
        return found is not None

    def go_back_before(self, step: int) -> bool:
        """Make the newest whole checkpoint from before `step` the newest, removing later ones.

        Returns False, and removes nothing, if there is none.
        """
        found = self._checkpointer.go_back_before(step)
        self.newest = found or self.newest
        return found is not None

    def _refuse_other_skips(self, newest: Path, found: State) -> None:
        """Raise KieloError if the recipe skips other steps than the checkpoint's run did.

        Steps to come may be skipped freely; for others the run must go back to an earlier checkpoint. What
        was passed over for spikes stays so, whatever the recipe says.
        """
        skipped_steps, asked = found.skipped_steps, self._resolved.identity.train.skip_steps
        parting_step = first_difference(skipped_steps, merged([*asked, *found.spike_steps]), found.step)
        if parting_step is None:
            return
        folder = newest.parent
        passed_over = [list(span) for span in skipped_steps] or "none"
        earlier, behind = _split_names(folder, parting_step)
        if earlier:
            way_on = f"move {', '.join(behind)} out of {folder} and the run goes on from {earlier[0]}"
        else:
            way_on = f"move {folder.parent} away and the run begins at step 0"
        raise KieloError(
            f"{newest}: was trained with other steps skipped, from step {parting_step} on: it passed "
            f"over {passed_over}, and train.skip_steps = {[list(entry) for entry in asked]}; "
            f"{way_on}, or give train.skip_steps as it was"
        )


def _split_names(folder: Path, step: int) -> tuple[list[str], list[str]]:
    """Return names of checkpoints: those of steps before `step`, newest first; the others, oldest first."""
    steps = {path.name: step_of(path) or 0 for path in step_folders(folder)}
    before = [name for name, of in steps.items() if of < step]
    return before, [name for name in reversed(steps) if steps[name] >= step]


def note_alert(path: Path, step: int, message: str) -> None:
    """Warn on the terminal and appends {"time", "step", "message"} to `path` (`train/alerts.jsonl`).

    It is for errors that do not stop the run.
    """
    logger.warning("step %d: %s", step, message)
    with suppress(OSError):  # a full disk may be the very error
        append_alert(path, step, message)
