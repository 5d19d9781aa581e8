"""Where a run stands, and how that becomes a checkpoint and comes back.

A checkpoint holds the weights, both moments, the number of updates, step, tokens and samples (all that the data
order needs), the steps that were passed over, what was computed in which precision, the guard's counts, the step's loss
and the identity of the run. Nothing in it depends on the layout, so any number of ranks restores it; on the same number the run ends with bitwise the
weights of one that was never stopped.
"""

import json
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError
from torch import Tensor

from kielo.artifact.checkpoint_index import step_folders, step_of
from kielo.checkpoint.store import Store, read_plain
from kielo.recipe.errors import KieloError
from kielo.resolve.phases import first_difference
from kielo.resolve.resolve import consent
from kielo.resolve.resolved import Identity, Resolved
from kielo.train.guard import Guard
from kielo.train.optimiser import Optimiser

logger = logging.getLogger(__name__)


@dataclass
class State:
    """Steps done, and with them tokens and samples: a skipped step counts too, for its text is behind us.

    skipped_steps: the [first, last] steps that the recipe passed over so far. precisions: [first step, precision] of each
    stretch, as it was computed. refused_changes: first steps of the recipe's changes of precision that were taken back.
    watch: of the change that is being watched (see `precision_change.py`), None when none is.
    """

    step: int = 0
    tokens: int = 0
    samples: int = 0
    skipped_steps: list[list[int]] = field(default_factory=list)
    precisions: list[list] = field(default_factory=list)
    refused_changes: list[int] = field(default_factory=list)
    watch: dict[str, float] | None = None

    def advance(self, tokens_per_step: int, sequences_per_step: int) -> None:
        self.step += 1
        self.tokens += tokens_per_step
        self.samples += sequences_per_step

    def pass_over(self, last_step: int, tokens_per_step: int, sequences_per_step: int) -> None:
        """Leave steps of one size behind, up to `last_step`."""
        first_step = self.step + 1
        while self.step < last_step:
            self.advance(tokens_per_step, sequences_per_step)
        if self.skipped_steps and self.skipped_steps[-1][1] == first_step - 1:
            self.skipped_steps[-1][1] = last_step
        else:
            self.skipped_steps.append([first_step, last_step])

    def restore(self, plain: Mapping[str, object]) -> None:
        """Become what a checkpoint's plain state says; what versions before did not know keeps its first value."""
        for name, first in asdict(State()).items():
            setattr(self, name, plain.get(name, first))


class Checkpoints:
    """Saves and restores the parts of a run that move. All ranks call each method together."""

    def __init__(self, store: Store, resolved: Resolved):
        """Finds the newest whole checkpoint (the store says which it passed over). Raises KieloError, naming the keys,
        where it is of a run with another identity: before a model is built that it would not fit.
        """
        self._store = store
        self._resolved = resolved
        self.newest: Path | None = store.newest()
        self.found = State()  # what the run goes on from
        if self.newest is not None:
            plain = read_plain(self.newest)
            self.found.restore(plain)
            self._refuse_another_identity(plain["identity"])
            self._refuse_other_skips(plain["skipped_steps"], plain["step"])

    def track(
        self,
        parameters: Mapping[str, Tensor],
        optimiser: Optimiser,
        guard: Guard,
        state: State,
        source_tensors: Mapping[str, str] | None = None,
    ) -> None:
        """Say what moves, and make the memory that saving takes. parameters: our name → DTensor.

        source_tensors: what the weights that the run begins from call their tensors, and their dtypes; an export
        gives them back.
        """
        self._optimiser, self._guard, self._state = optimiser, guard, state
        self._source_tensors = dict(source_tensors or {})
        self._tensors = {f"model/{name}": tensor for name, tensor in parameters.items()}
        self._tensors |= {f"optimiser/{name}": tensor for name, tensor in optimiser.moments().items()}
        self._store.reserve(self._tensors)

    def forget(self) -> None:
        """Let go of what `track` was told, so that its memory can be given back."""
        self._optimiser, self._tensors = None, {}

    def due(self, step: int) -> bool:
        """Not while a change of precision is watched, which may lead back to the checkpoint before it."""
        if step == self._resolved.identity.total_steps:
            return True
        return step % self._resolved.placement.checkpoint_every_steps == 0 and self._state.watch is None

    @property
    def newest_step(self) -> int | None:
        return None if self.newest is None else step_of(self.newest)

    def save(self, loss: Tensor | float | None) -> None:
        """Copy what moves, and have it written while training goes on; a failure is told and tried again when next due.

        loss: of this step, over all ranks, for people who look at checkpoints; None where the step was passed over.
        """
        settled_loss = math.nan if loss is None else float(loss)  # waits for the device, as the copy does
        plain = asdict(self._state) | {
            "loss": settled_loss if math.isfinite(settled_loss) else None,
            "optimiser_updates": self._optimiser.updates,
            "guard": self._guard.plain_state(),
            "identity": self._resolved.identity.model_dump(mode="json"),
            "source_tensors": self._source_tensors,
        }
        self._store.save(self._state.step, self._tensors, plain)

    def settle(self) -> None:
        """Wait for the last save. Raises KieloError where it failed: there is no next one to make up for it."""
        self.newest = self._store.settle() or self.newest

    def close(self) -> None:
        """Let a save under way come to its end, also when training has failed."""
        self._store.close()

    def restore(self) -> None:
        """Go back to the newest checkpoint; without one everything stays at the first weights and step 0."""
        if self.newest is None:
            return
        plain = self._store.restore(self.newest, self._tensors)
        self._optimiser.updates = plain["optimiser_updates"]
        self._guard.restore(plain["guard"])
        self._source_tensors = plain["source_tensors"]
        self._state.restore(plain)

    def go_back_to(self, step: int) -> bool:
        """Whether there is a checkpoint of this step; then later ones are removed and `restore` restores this one."""
        found = self._store.go_back_to(step)
        self.newest = found or self.newest
        return found is not None

    def _refuse_another_identity(self, plain_identity: dict) -> None:
        try:
            identity = Identity.model_validate(plain_identity)
        except ValidationError as error:
            keys = ", ".join(".".join(map(str, entry["loc"])) for entry in error.errors())
            raise KieloError(
                f"{self.newest}: was written by another version of kielo, whose runs are described otherwise ({keys});"
                " go on with that version, or give the recipe another folder"
            ) from None
        consent(identity, self._resolved)

    def _refuse_other_skips(self, skipped_steps: list[list[int]], step: int) -> None:
        """Which steps are skipped may change for those to come, and for others by going back to an earlier checkpoint."""
        asked = self._resolved.identity.skip_steps
        parting_step = first_difference([(first, last) for first, last in skipped_steps], asked, step)
        if parting_step is None:
            return
        folder = self.newest.parent
        behind = [path for path in step_folders(folder) if step_of(path) >= parting_step]
        earlier = [path for path in step_folders(folder) if step_of(path) < parting_step]
        goes_on = f"goes on from {earlier[0].name}" if earlier else "begins anew"
        raise KieloError(
            f"{self.newest}: was trained with other steps skipped, from step {parting_step} on: it passed over "
            f"{skipped_steps or 'none'}, and train.skip_steps = {[list(entry) for entry in asked]}; move "
            f"{', '.join(path.name for path in reversed(behind))} out of {folder} and the run {goes_on}, or give "
            "train.skip_steps as it was"
        )


def note_alert(path: Path, step: int, message: str) -> None:
    """Warn on the terminal, and append {"time", "step", "message"} to `path` (`train/alerts.jsonl`): for what went wrong
    without stopping the run.
    """
    logger.warning("step %d: %s", step, message)
    row = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "step": step, "message": message}
    with suppress(OSError), open(path, "a", encoding="utf-8") as file:  # a full disk may be the very thing told
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
