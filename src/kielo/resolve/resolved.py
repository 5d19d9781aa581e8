"""`resolved.toml`: every number of a run. Written by `resolve`, read by every rank.

The identity is what the run trains: each checkpoint stores it, and a change of it is another run. The
placement is where and how an attempt runs, and is resolved again for every attempt.

Both contain whole sections of the recipe (`model`, `dataset`, `train`; `layout`, `train`, `checkpoint`), with
values that the recipe leaves to Kielo, such as `layout.shard = 0`, filled in. All their other keys are
derived. A new key of a section of `recipe/sections.py` is here without an edit.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from kielo.artifact import run_format
from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import write_text_atomically
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import (
    Checkpoint,
    CompleteModel,
    DatasetIdentity,
    Layout,
    Packing,
    RecipeIdentity,
    ScheduleName,
    TrainIdentity,
    TrainPlacement,
)
from kielo.recipe.toml_text import toml_table

_HEADER = "# Written by kielo from the recipe and the machine; edit the recipe instead.\n"
OWN_FILE_STALL_SECONDS = 18.0  # of a file system that only this machine uses


class _Frozen(BaseModel):
    """A table of derived numbers, which can be larger than a recipe's."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class PlannedPhase(_Frozen):
    """Steps `first_step` … `last_step` (from 1) of one size, from sample `first_sample` on.

    `number` is the recipe's phase. Entries of a batch ramp share it and their order of the data, which begins
    at `order_first_sample` with `offsets` tokens drawn from each source before, the filling of best-fit
    packed sequences included. `mixture`: source → weight. `max_gradient_norm` is None for `train`'s,
    `trainable` () for all modules.
    """

    number: PositiveInt
    first_step: PositiveInt
    steps: PositiveInt
    first_sample: int
    sequence_length: PositiveInt
    sequences_per_step: PositiveInt
    tokens_per_step: PositiveInt
    mixture: dict[str, float]
    order_first_sample: int
    offsets: dict[str, int]
    packing: Packing = "one_stream"
    max_gradient_norm: float | None = None
    trainable: tuple[str, ...] = ()

    @property
    def last_step(self) -> int:
        return self.first_step + self.steps - 1


class LearningRateSegment(_Frozen):
    """Learning rates over `tokens` tokens after the first `first_token` tokens of the run.

    The rate rises from the rate before (0 at the start) to `peak` in `warmup_tokens`, then falls to `final`.
    The last `decay_tokens` are the schedule's decay.
    """

    first_token: int
    tokens: PositiveInt
    peak: float
    final: float
    schedule: ScheduleName
    warmup_tokens: int
    decay_tokens: int


@dataclass(frozen=True)
class StepRange:
    """Steps of `Identity.phases[phase_index]` up to `last_step`, all trained or all skipped."""

    phase_index: int
    last_step: int
    is_skipped: bool


class Identity(RecipeIdentity):
    """The description of what the run trains.

    `model` is complete. In `train`, ranges of `skip_steps` and `precision_changes` are in order, the ranges
    do not overlap, and `heldout_sequences` is at most the number of held-out sequences.
    """

    model: CompleteModel
    dataset: DatasetIdentity
    train: TrainIdentity
    tokens_hash: str
    phases: tuple[PlannedPhase, ...]
    learning_rates: tuple[LearningRateSegment, ...]

    @property
    def total_steps(self) -> int:
        return self.phases[-1].last_step

    @property
    def total_tokens(self) -> int:
        return sum(phase.steps * phase.tokens_per_step for phase in self.phases)

    @property
    def longest_sequence_length(self) -> int:
        return max(phase.sequence_length for phase in self.phases)

    def phase_index(self, step: int) -> int:
        """Return the index in `phases` of step `step`, or the last for later steps."""
        later = (index for index, phase in enumerate(self.phases) if step <= phase.last_step)
        return next(later, len(self.phases) - 1)

    def max_gradient_norm(self, index: int) -> float:
        own = self.phases[index].max_gradient_norm
        return self.train.max_gradient_norm if own is None else own

    def next_steps(self, step: int, also_skipped: Sequence[tuple[int, int]] = ()) -> StepRange:
        """Return the steps from `step` on without a change: of phase, precision, or between trained and
        skipped.

        also_skipped: ranges [first, last] beside the recipe's.
        """
        index = self.phase_index(step)
        changes = [first_step - 1 for first_step, _ in self.train.precision_changes if first_step > step]
        last = min([self.phases[index].last_step, *changes])
        for first_skipped, last_skipped in sorted([*self.train.skip_steps, *also_skipped]):
            if first_skipped <= step <= last_skipped:
                return StepRange(index, min(last, last_skipped), is_skipped=True)
            if step < first_skipped:
                return StepRange(index, min(last, first_skipped - 1), is_skipped=False)
        return StepRange(index, last, is_skipped=False)

    def tokens_after(self, step: int) -> int:
        """Return the tokens of the first `step` steps, with skipped steps. Later steps have the last size."""
        within = sum(
            phase.tokens_per_step * (min(step, phase.last_step) - phase.first_step + 1)
            for phase in self.phases
            if phase.first_step <= step
        )
        return within + max(0, step - self.total_steps) * self.phases[-1].tokens_per_step


class PhasePlacement(_Frozen):
    """Steps of a phase on a rank, in the order of `Identity.phases`."""

    micro_batch_sequences: PositiveInt
    micro_batches_per_step: PositiveInt
    flops_per_token: int
    planned_tokens_per_second: float | None = None


class Placement(_Frozen):
    """Where and how a run is computed.

    `layout` has every size filled in: its axes multiply to `world_size`, and in a recipe it gives the same
    run. `checkpoint.keep_every_steps` is filled in. peak_tflops: precision → TFLOP/s of an accelerator, if
    its card knows it. file_stall_seconds: longest wait for a file.
    """

    world_size: PositiveInt
    layout: Layout
    train: TrainPlacement
    checkpoint: Checkpoint
    phases: tuple[PhasePlacement, ...]
    device: Literal["cpu", "cuda"]
    accelerator: str
    peak_tflops: dict[str, float] = {}
    parameters: int
    end_of_text_id: int
    file_stall_seconds: float = OWN_FILE_STALL_SECONDS
    tokenizer_hash: str = ""
    tokens_folder: str
    tokenizer_folder: str
    train_folder: str


Value = TypeVar("Value")


def filled(value: Value | None) -> Value:
    """Return a value of a section that a recipe can leave out and `resolve` fills in."""
    if value is None:
        raise ValueError("a section of a recipe that is not resolved")
    return value


class Resolved(_Frozen):
    identity: Identity
    placement: Placement


def stored_identity(identity: Identity) -> JsonTable:
    """Return the identity as JSON with the format's version, for checkpoints and manifests."""
    return run_format.with_version(identity.model_dump(mode="json"))


def read_identity(stored: Mapping[str, Any], where: Path | str) -> Identity:
    """Return the identity that any version stored. Raises KieloError with the keys that do not fit."""
    content = run_format.migrated_identity(stored, where)
    try:
        return _identity(content)
    except ValidationError as error:
        raise KieloError(
            f"{where}: describes its run with keys or values that this Kielo does not know "
            f"({_keys_of(error)}). Fix: the Kielo that wrote it, or another folder in the recipe"
        ) from None


def as_stored_now(stored: Mapping[str, Any], where: Path | str) -> JsonTable:
    """Return an identity that any version stored in this version's form, so that two can be compared.

    Content that does not fit an identity stays. Raises KieloError for a later version of the format.
    """
    content = run_format.migrated_identity(stored, where)
    try:
        return stored_identity(_identity(content))
    except ValidationError:
        return content


def write(resolved: Resolved, path: Path | str) -> None:
    """Write as TOML, aside and renamed, without None. KieloError for a file that is not Kielo's."""
    try:
        is_own = not os.path.lexists(path) or Path(path).read_text(encoding="utf-8").startswith(_HEADER)
    except (OSError, ValueError):
        is_own = False
    if not is_own:
        raise KieloError(
            f"{path}: exists, and Kielo did not write it. Fix: move it away; nothing was written"
        )
    text = f"{_HEADER}{run_format.VERSION_KEY} = {run_format.FORMAT_VERSION}\n"
    for name, part in resolved.model_dump(mode="json").items():
        text += toml_table(name, part)
    write_text_atomically(path, text)


def read(path: Path | str) -> Resolved:
    """Read what any version wrote. Raises KieloError with the file and the keys that do not fit."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        why = f"cannot be read ({error.strerror}). Fix: `kielo plan resolve RECIPE` writes it"
        raise KieloError(f"{path}: {why}") from None
    except ValueError as error:
        why = f"not valid TOML ({error}). Fix: delete it, and `kielo train` writes it again"
        raise KieloError(f"{path}: {why}") from None
    content = run_format.migrated_run(content, path)
    try:
        return Resolved.model_validate(content)
    except ValidationError as error:
        why = f"does not fit this version of kielo ({_keys_of(error)}). Fix: delete it and resolve again"
        raise KieloError(f"{path}: {why}") from None


def _identity(content: JsonTable) -> Identity:
    own = {key: value for key, value in content.items() if key != run_format.VERSION_KEY}
    return Identity.model_validate(own)


def _keys_of(error: ValidationError) -> str:
    return ", ".join(".".join(map(str, entry["loc"])) for entry in error.errors())


def placed_as_trained(placed: Resolved, run_folder: Path) -> Resolved:
    """Return the placement of this job with the identity of the run's resolved.toml."""
    identity = read(run_folder / "resolved.toml").identity
    if identity.model != placed.identity.model:
        raise KieloError(
            f"{run_folder / 'resolved.toml'}: the run has another [model] than the recipe. "
            "Fix: the recipe with which it was trained"
        )
    return placed.model_copy(update={"identity": identity})
