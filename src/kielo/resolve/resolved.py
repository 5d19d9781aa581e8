"""`resolved.toml`: every derived number of a run, once. Written by `resolve`, read by every rank.

Identity is what is trained: a change of it is another run and needs consent. Placement is where and how this
attempt runs: layout, micro-batch, folders; it is resolved anew for every attempt.
"""

import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from kielo.artifact.manifest import hash_json, write_text_atomically
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Fp8, Model, Precision, ScheduleName

_HEADER = "# Written by kielo from the recipe and the machine; edit the recipe instead.\n"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Phase(_Frozen):
    """Steps `first_step` … `last_step` (from 1) of one size, from sample `first_sample` on.

    `number` is the recipe's phase; those of a batch ramp share it, and with it their order of the data, which
    begins at `order_first_sample` with `offsets` tokens drawn from each source before it. `mixture`: source →
    weight.
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

    @property
    def last_step(self) -> int:
        return self.first_step + self.steps - 1


class RateStretch(_Frozen):
    """Learning rates over `tokens` tokens after the first `first_token` of the run: from the rate before it
    (0 at the start) to `peak` in `warmup_tokens`, then down to `final`; `decay_tokens` of the end are the
    schedule's decay.
    """

    first_token: int
    tokens: PositiveInt
    peak: float
    final: float
    schedule: ScheduleName
    warmup_tokens: int
    decay_tokens: int


class Identity(_Frozen):
    """What is trained. `model` is complete: vocab_size, num_key_value_heads, head_dim and positions are set.

    `skip_steps` are [first, last] steps that are passed over, in order, without overlap.
    """

    name: str
    language: str
    seed: int
    model: Model
    mask_documents: bool
    tokens_hash: str
    phases: tuple[Phase, ...]
    skip_steps: tuple[tuple[int, int], ...] = ()
    learning_rates: tuple[RateStretch, ...]
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_gradient_norm: float
    z_loss: float
    precision: Precision
    precision_changes: tuple[tuple[int, Precision], ...] = ()
    fp8: Fp8 = Fp8()
    optimiser_state: Literal["fp32", "bf16"] = "fp32"
    max_skipped_steps_in_a_row: PositiveInt
    heldout_sequences: PositiveInt

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
        """Which of `phases` step `step` is in; the last one's for later steps."""
        return next(
            (i for i, phase in enumerate(self.phases) if step <= phase.last_step), len(self.phases) - 1
        )

    def stretch(self, step: int) -> tuple[int, int, bool]:
        """What step `step` begins when the steps before it are done: which of `phases`, its last step in one
        go, and whether its steps are passed over. A change of precision begins another stretch.
        """
        index = self.phase_index(step)
        changes = [first_step - 1 for first_step, _ in self.precision_changes if first_step > step]
        last = min([self.phases[index].last_step, *changes])
        for first_skipped, last_skipped in self.skip_steps:
            if first_skipped <= step <= last_skipped:
                return index, min(last, last_skipped), True
            if step < first_skipped:
                return index, min(last, first_skipped - 1), False
        return index, last, False

    def tokens_after(self, step: int) -> int:
        """Tokens of the first `step` steps, passed-over ones included; steps after the last are
        of its size.
        """
        within = sum(
            phase.tokens_per_step * (min(step, phase.last_step) - phase.first_step + 1)
            for phase in self.phases
            if phase.first_step <= step
        )
        return within + max(0, step - self.total_steps) * self.phases[-1].tokens_per_step


class PhasePlacement(_Frozen):
    """How one rank takes the steps of the phase with the same place in `Identity.phases`."""

    micro_batch_sequences: PositiveInt
    micro_batches_per_step: PositiveInt
    flops_per_token: int
    planned_tokens_per_second: float | None = None


class Placement(_Frozen):
    """Where and how it runs. Axis sizes multiply to world_size; `phases` are in the order of the identity's;
    peak_tflops: precision → TFLOP/s of one accelerator, as far as its card knows them.
    """

    world_size: PositiveInt
    pipeline: PositiveInt = 1
    pipeline_schedule: str = "1f1b"
    pipeline_layers: tuple[int, ...] = ()
    replicate: PositiveInt
    shard: PositiveInt
    context: PositiveInt = 1
    tensor: PositiveInt = 1
    expert: PositiveInt = 1
    sequence_parallel: bool = True
    zero: Literal[1, 2, 3] = 1
    cpu_offload: bool = False
    context_attention: Literal["all_gather", "ulysses"] = "all_gather"
    compile: bool = False
    recompute: Literal["none", "attention", "operators", "full"] = "none"
    recompute_every_layers: PositiveInt = 1
    recompute_saved_operators: tuple[str, ...] = ()
    phases: tuple[PhasePlacement, ...]
    device: Literal["cpu", "cuda"]
    accelerator: str
    peak_tflops: dict[str, float] = {}
    parameters: int
    end_of_text_id: int
    tokenizer_hash: str = ""
    loss_chunk_tokens: PositiveInt
    log_every_steps: PositiveInt
    heldout_every_steps: PositiveInt
    checkpoint_every_steps: PositiveInt
    keep_newest: PositiveInt
    keep_every_steps: int
    tensorboard: bool
    start_timeout_seconds: float
    tokens_folder: str
    tokenizer_folder: str
    train_folder: str


class Resolved(_Frozen):
    identity: Identity
    placement: Placement


def identity_hash(identity: Identity) -> str:
    """xxh3-128 of what is trained, in hexadecimal."""
    return hash_json(identity.model_dump(mode="json"))


def write(resolved: Resolved, path: Path | str) -> None:
    """Write as TOML, aside and renamed. Values that are None are left out. KieloError where another file has
    the name.
    """
    try:
        is_own = not os.path.lexists(path) or Path(path).read_text(encoding="utf-8").startswith(_HEADER)
    except (OSError, ValueError):
        is_own = False
    if not is_own:
        raise KieloError(
            f"{path}: is there already, and Kielo did not write it; move it away, nothing was written"
        )
    text = _HEADER
    for name, part in resolved.model_dump(mode="json").items():
        text += _table(name, part)
    write_text_atomically(path, text)


def read(path: Path | str) -> Resolved:
    """Read what `write` wrote. Raises KieloError naming the file and the keys that do not fit."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise KieloError(
            f"{path}: cannot be read ({error.strerror}); `kielo plan resolve RECIPE` writes it"
        ) from None
    except ValueError as error:
        raise KieloError(
            f"{path}: not valid TOML ({error}); delete it, `kielo train` writes it again"
        ) from None
    try:
        return Resolved.model_validate(content)
    except ValidationError as error:
        keys = ", ".join(".".join(map(str, entry["loc"])) for entry in error.errors())
        raise KieloError(
            f"{path}: does not fit this version of kielo ({keys}); delete it and resolve again"
        ) from None


def _table(name: str, content: dict[str, Any], brackets: tuple[str, str] = ("[", "]")) -> str:
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    lists = {key: value for key, value in content.items() if _is_list_of_tables(value)}
    plain = {key: value for key, value in content.items() if value is not None and key not in tables | lists}
    text = f"\n{brackets[0]}{name}{brackets[1]}\n"
    text += "".join(f"{_key(key)} = {_value(value)}\n" for key, value in plain.items())
    text += "".join(_table(f"{name}.{_key(key)}", value) for key, value in tables.items())
    for key, entries in lists.items():
        text += "".join(_table(f"{name}.{_key(key)}", entry, ("[[", "]]")) for entry in entries)
    return text


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return '"' + "".join(_escape(character) for character in value) + '"'
    if isinstance(value, list):
        return "[" + ", ".join(_value(entry) for entry in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(entry)}" for key, entry in value.items()) + "}"
    raise TypeError(f"no TOML for {type(value).__name__}")


def _escape(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return f"\\u{ord(character):04x}" if ord(character) < 32 or ord(character) == 127 else character
