"""Where a run stands, and how that becomes a checkpoint and comes back.

A checkpoint holds the weights, both moments, the number of updates, step, tokens and samples (all that the data
order needs), the guard's counts and the identity of the run. Nothing in it depends on the layout, so any number of
ranks restores it; on the same number the run ends with bitwise the weights of one that was never stopped.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ValidationError
from torch import Tensor

from kielo.checkpoint.store import Store, read_plain
from kielo.plan.resolve import consent
from kielo.plan.resolved import Identity, Resolved
from kielo.recipe.errors import KieloError
from kielo.train.guard import Guard
from kielo.train.optimiser import Optimiser


@dataclass
class State:
    """Steps done, and with them tokens and samples: a skipped step counts too, for its text is behind us."""

    step: int = 0
    tokens: int = 0
    samples: int = 0

    def advance(self, tokens_per_step: int, sequences_per_step: int) -> None:
        self.step += 1
        self.tokens += tokens_per_step
        self.samples += sequences_per_step


class Checkpoints:
    """Saves and restores the parts of a run that move. All ranks call each method together."""

    def __init__(self, store: Store, resolved: Resolved):
        """Finds the newest whole checkpoint (the store says which it passed over). Raises KieloError, naming the keys,
        where it is of a run with another identity: before a model is built that it would not fit.
        """
        self._store = store
        self._resolved = resolved
        self.newest: Path | None = store.newest()
        if self.newest is not None:
            self._refuse_another_identity(read_plain(self.newest)["identity"])

    def track(self, parameters: Mapping[str, Tensor], optimiser: Optimiser, guard: Guard, state: State) -> None:
        """Say what moves. parameters: our name → DTensor."""
        self._optimiser, self._guard, self._state = optimiser, guard, state
        self._tensors = {f"model/{name}": tensor for name, tensor in parameters.items()}
        self._tensors |= {f"optimiser/{name}": tensor for name, tensor in optimiser.moments().items()}

    def due(self, step: int) -> bool:
        every_steps = self._resolved.placement.checkpoint_every_steps
        return step % every_steps == 0 or step == self._resolved.identity.total_steps

    def save(self) -> None:
        plain = asdict(self._state) | {
            "optimiser_updates": self._optimiser.updates,
            "guard": self._guard.plain_state(),
            "identity": self._resolved.identity.model_dump(mode="json"),
        }
        self.newest = self._store.save(self._state.step, self._tensors, plain)

    def restore(self) -> None:
        """Go back to the newest checkpoint; without one everything stays at the first weights and step 0."""
        if self.newest is None:
            return
        plain = self._store.restore(self.newest, self._tensors)
        self._optimiser.updates = plain["optimiser_updates"]
        self._guard.restore(plain["guard"])
        for name in asdict(self._state):
            setattr(self._state, name, plain[name])

    def _refuse_another_identity(self, plain_identity: dict) -> None:
        try:
            identity = Identity.model_validate(plain_identity)
        except ValidationError as error:
            keys = ", ".join(".".join(map(str, entry["loc"])) for entry in error.errors())
            raise KieloError(
                f"{self.newest}: was written by another version of kielo, whose runs are described otherwise ({keys});"
                " go on with that version, or give the recipe another folder"
            ) from None
        consent(Resolved(identity=identity, placement=self._resolved.placement), self._resolved)
