"""The state of a run, and its checkpoints, which do not depend on the layout.

On the same number of ranks a resumed run ends with bitwise the same weights as an uninterrupted run: always
on CPUs, on GPUs with train.deterministic.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter
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
from kielo.train.watch.checks import Guard, GuardState
from kielo.train.watch.spikes import Spikes, WentBack, steps_to_pass_over

logger = logging.getLogger(__name__)


class StepSpan(NamedTuple):
    first: int
    last: int


class PrecisionSince(NamedTuple):
    first_step: int
    precision: Precision


class TrainedSince(NamedTuple):
    updates: int  # `modules` are trained from the next optimiser update on
    modules: tuple[str, ...]  # empty for all


@dataclass(frozen=True)
class WatchedChange:
    """A watched change of precision: the usual values before it, and the highest relative rises since."""

    first_step: int
    loss: float
    gradient_norm: float
    loss_rise: float
    gradient_norm_rise: float


@dataclass(frozen=True)
class Trouble:
    """The last save before steps that were not finite, and the last save after such a step."""

    sound_step: int
    unsound_step: int


@dataclass
class State:
    """The steps, tokens and samples done, skipped steps included."""

    step: int = 0
    tokens: int = 0
    samples: int = 0
    skipped_steps: list[StepSpan] = field(default_factory=list)
    precisions: list[PrecisionSince] = field(default_factory=list)
    refused_changes: list[int] = field(default_factory=list)  # first steps of those that were taken back
    watch: WatchedChange | None = None
    trouble: Trouble | None = None  # None without bad steps, or once enough sound steps followed
    spikes: list[WentBack] = field(default_factory=list)
    trained: list[TrainedSince] = field(default_factory=list)  # empty if all steps train all modules

    @property
    def spike_steps(self) -> list[tuple[int, int]]:
        """The ranges [first, last] to pass over for spikes. They can lie ahead, and overlap."""
        return [(spike.first_step, spike.last_step) for spike in self.spikes]

    @property
    def learning_rate_factor(self) -> float:
        return math.prod(spike.learning_rate_factor for spike in self.spikes if spike.first_step <= self.step)

    def advance(self, tokens_per_step: int, sequences_per_step: int) -> None:
        self.step += 1
        self.tokens += tokens_per_step
        self.samples += sequences_per_step

    def pass_over(self, last_step: int, tokens_per_step: int, sequences_per_step: int) -> None:
        first_step = self.step + 1
        while self.step < last_step:
            self.advance(tokens_per_step, sequences_per_step)
        if self.skipped_steps and self.skipped_steps[-1].last == first_step - 1:
            first_step = self.skipped_steps.pop().first
        self.skipped_steps.append(StepSpan(first_step, last_step))

    def begun(self, is_trained: Callable[[Sequence[str]], bool]) -> int | None:
        """Return the run's updates before a parameter was (last) unfrozen, or None if it is frozen.

        is_trained: modules → True if they contain the parameter.
        """
        begins = None
        for first, modules in reversed(self.trained or [TrainedSince(0, ())]):
            if not is_trained(modules):
                break
            begins = first
        return begins

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Restore a checkpoint's plain state. Fields that it lacks get their defaults."""
        known = {name: plain[name] for name in vars(self) if name in plain}
        vars(self).update(vars(TypeAdapter(State).validate_python(known)))


class RunCheckpoints:
    def __init__(
        self,
        checkpointer: Checkpointer,
        resolved: Resolved,
        guard: Guard,
        spikes: Spikes,
        state: State,
        is_saving: bool = True,
    ):
        """Find the newest complete checkpoint. Raises KieloError, with the keys, if its identity differs."""
        self._checkpointer = checkpointer
        self._resolved = resolved
        self._guard, self._spikes, self._state = guard, spikes, state
        self._is_saving = is_saving
        self._last_save = (0, 0)  # its step, and the number of steps until then that were not finite
        self._is_due = False
        self.newest: Path | None = checkpointer.newest()
        self.found = State()  # where the run resumes
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
        """Register the tensors to save, and reserve host memory for their copies.

        source_*: the names and dtypes of the tensors that gave the first weights, and what `read_settings`
        read, for an export.
        """
        self._optimiser = optimiser
        self._source_tensors = dict(source_tensors or {})
        self._source_settings: dict[str, object] | None = dict(source_settings or {})
        self._tensors: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in parameters.items()}
        self._tensors |= {f"optimiser/{name}": tensor for name, tensor in optimiser.moments().items()}
        if self._is_saving:
            self._checkpointer.reserve(self._tensors)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return dict(self._tensors)

    def forget(self) -> None:
        del self._optimiser
        self._tensors = {}

    def due(self, step: int) -> bool:
        """Return True if a checkpoint must be saved after `step`. Call it after every step.

        A watched change of precision, a spike and a bad step delay the save until they are over.
        """
        if not self._is_saving:
            return False
        if step == self._resolved.identity.total_steps:
            return True
        if step % self._resolved.placement.checkpoint.every_steps == 0 and self._state.watch is None:
            self._is_due = True
        return self._is_due and self._may_save()

    def is_copy_due(self, step: int) -> bool:
        every_steps = self._resolved.placement.checkpoint.memory_every_steps
        if not self._is_saving or not every_steps or step % every_steps or self._state.watch is not None:
            return False
        return self._may_save()

    def _may_save(self) -> bool:
        return self._spikes.episode is None and not self._guard.bad_in_a_row

    def shortage(self) -> str | None:
        return self._checkpointer.shortage() if self._is_saving else None

    @property
    def newest_step(self) -> int | None:
        return None if self.newest is None else step_of(self.newest)

    def save(self, loss: Tensor | float | None) -> None:
        """Copy the state to the host and start to write it while training continues. A failed save is logged.

        The newest checkpoint from before bad steps is kept until `checkpoint.every_steps` sound steps
        followed. A save right after a bad step (a signal, the last step) removes no checkpoint. Only people
        read `loss`.
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
                f"{step_folder_name(self._state.step)}. If training fails from there, move it away to resume "
                "from an older checkpoint"
            )
        sound_steps = [trouble.sound_step] if trouble else []
        if self._spikes.episode is not None:
            sound_steps.append(steps_to_pass_over(self._spikes.episode)[0] - 1)
        keep_sound = min(sound_steps, default=None)
        self._checkpointer.save(self._state.step, self._tensors, plain, keep_sound, keep_all)

    def copy_to_memory(self, loss: Tensor) -> None:
        guard = self._guard.state()
        trouble = self._trouble(guard.skipped)
        plain = self._plain(guard, loss) | {"trouble": None if trouble is None else asdict(trouble)}
        self._checkpointer.copy_to_memory(self._state.step, self._tensors, plain)

    def _plain(self, guard: GuardState, loss: Tensor | float | None) -> dict[str, object]:
        # The guard remembers no step without a label. Both reads wait for the device, as the copy does.
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
        """Return `State.trouble` after this step. skipped: bad steps since step 1."""
        state, (last_step, skipped_before) = self._state, self._last_save
        if skipped > skipped_before:
            return Trouble(state.trouble.sound_step if state.trouble else last_step, state.step)
        every_steps = self._resolved.placement.checkpoint.every_steps
        if state.trouble and state.step - state.trouble.unsound_step >= every_steps:
            return None
        return state.trouble

    def way_on(self, first_bad_step: int) -> str:
        """Return how to resume a run that ends because of bad steps since `first_bad_step`, in sentences.

        The update of the step before is suspect, and so is its checkpoint.
        """
        with suppress(KieloError):  # reported already
            self._checkpointer.settle()
        folder = self._checkpointer.folder
        try:
            names, suspects = _split_names(folder, first_bad_step - 1)
        except KieloError as error:
            return f"{str(error).partition('. Fix: ')[0]}. "
        if not names:
            if not suspects:
                return f"No checkpoint had been saved before step {first_bad_step}. "
            only = f"No sound step followed the only checkpoint in {folder}, {suspects[0]}"
            return f"{only}, so its weights may be spoilt. "
        if not suspects:
            return (
                f"{names[0]} is the newest checkpoint, from before the first bad step {first_bad_step}. "
                "The same command resumes from it. "
            )
        return (
            f"{names[0]} is the newest checkpoint that a sound step followed, before the first bad step "
            f"{first_bad_step}. Move {', '.join(suspects)} out of {folder}, and the same command resumes "
            f"from {names[0]}. "
        )

    def settle(self) -> None:
        """Wait for the last save. Raises KieloError if it failed, because no later save can replace it."""
        self.newest = self._checkpointer.settle() or self.newest

    def close(self) -> None:
        self._checkpointer.close()

    def restore(self) -> None:
        """Restore the newest checkpoint, if any. Parameters that were frozen begin with moments of 0."""
        if self.newest is None:
            return
        plain, stored = self._checkpointer.plain(self.newest), State()
        stored.restore(plain)
        updates = plain["optimiser_updates"]
        model = self._resolved.identity.model
        begun = {name: stored.begun(partial(trains, model, name=name)) for name in self._optimiser.parameters}
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
        self._source_settings = plain.get("source_settings")  # None: an older version stored none
        spikes = self._state.spikes  # an earlier checkpoint lacks the spike that the run goes back for
        self._state.restore(plain)
        self._state.spikes = max(spikes, self._state.spikes, key=len)
        self._last_save, self._is_due = (self._state.step, guard.skipped), False

    def note_trainable(self, modules: Sequence[str]) -> None:
        """Note the modules that are trained from here on, an empty sequence for all, if they have changed.

        The watch of a change of precision ends, because the gradient norm is over other parameters.
        """
        state = self._state
        before = state.trained or [TrainedSince(0, ())]
        if tuple(modules) == before[-1].modules:
            return
        entry = TrainedSince(self._optimiser.updates, tuple(modules))
        state.trained = [*before, entry] if state.step else [entry]
        state.watch = None

    def go_back_to(self, step: int) -> bool:
        """Make this step's checkpoint the newest, and remove later checkpoints. Return False without one."""
        return self._make_newest(self._checkpointer.go_back_to(step))

    def go_back_before(self, step: int) -> bool:
        """Make the newest complete checkpoint from before `step` the newest, as `go_back_to`."""
        return self._make_newest(self._checkpointer.go_back_before(step))

    def _make_newest(self, found: Path | None) -> bool:
        self.newest = found or self.newest
        return found is not None

    def _refuse_other_skips(self, newest: Path, found: State) -> None:
        """Raise KieloError if the recipe skips different past steps. Steps passed over for spikes stay so."""
        skipped_steps, asked = found.skipped_steps, self._resolved.identity.train.skip_steps
        parting_step = first_difference(skipped_steps, merged([*asked, *found.spike_steps]), found.step)
        if parting_step is None:
            return
        folder = newest.parent
        passed_over = [list(span) for span in skipped_steps] or "none"
        earlier, behind = _split_names(folder, parting_step)
        if earlier:
            way_on = f"move {', '.join(behind)} out of {folder}, and the run resumes from {earlier[0]}"
        else:
            way_on = f"move {folder.parent} away, and the run begins at step 0"
        raise KieloError(
            f"{newest}: the run skipped different steps from step {parting_step} on. It passed over "
            f"{passed_over}, but train.skip_steps = {[list(entry) for entry in asked]}. "
            f"Fix: train.skip_steps as it was. Or {way_on}"
        )


def _split_names(folder: Path, step: int) -> tuple[list[str], list[str]]:
    """Return checkpoint names: from before `step`, newest first, and the others, oldest first."""
    steps = {path.name: step_of(path) or 0 for path in step_folders(folder)}
    before = [name for name, of in steps.items() if of < step]
    return before, [name for name in reversed(steps) if steps[name] >= step]


def note_alert(path: Path, step: int, message: str) -> None:
    """Warn on the terminal and append {"time", "step", "message"} to `path` (`train/alerts.jsonl`)."""
    logger.warning("step %d: %s", step, message)
    with suppress(OSError):  # a full disk may be the very error
        append_alert(path, step, message)
