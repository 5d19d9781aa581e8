"""`resolved.toml`: every derived number of a run, once. Written by `resolve`, read by every rank.

Identity is what is trained: a change of it is another run and needs consent. Placement is where and how this
attempt runs: layout, micro-batch, folders; it is resolved anew for every attempt.
"""

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from kielo.artifact.manifest import hash_json, write_text_atomically
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Model


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Identity(_Frozen):
    """What is trained. `model` is complete: vocab_size, num_key_value_heads, head_dim and positions are set."""

    name: str
    language: str
    seed: int
    model: Model
    sequence_length: PositiveInt
    mixture: dict[str, float]
    mask_documents: bool
    tokens_hash: str
    total_steps: PositiveInt
    tokens_per_step: PositiveInt
    sequences_per_step: PositiveInt
    learning_rate: float
    final_learning_rate: float
    schedule: Literal["cosine", "linear", "wsd"]
    warmup_steps: int
    decay_steps: int
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_gradient_norm: float
    z_loss: float
    precision: Literal["fp32", "bf16"]
    max_skipped_steps_in_a_row: PositiveInt
    heldout_sequences: PositiveInt
    max_epochs: float


class Placement(_Frozen):
    """Where and how it runs. Axis sizes multiply to world_size; micro-batches are counted for one rank."""

    world_size: PositiveInt
    pipeline: PositiveInt = 1
    replicate: PositiveInt
    shard: PositiveInt
    context: PositiveInt = 1
    tensor: PositiveInt = 1
    expert: PositiveInt = 1
    sequence_parallel: bool = True
    zero: Literal[1, 2, 3] = 1
    cpu_offload: bool = False
    context_attention: Literal["all_gather", "ulysses"] = "all_gather"
    recompute: Literal["none", "attention", "operators", "full"] = "none"
    recompute_every_layers: PositiveInt = 1
    recompute_saved_operators: tuple[str, ...] = ()
    micro_batch_sequences: PositiveInt
    micro_batches_per_step: PositiveInt
    device: Literal["cpu", "cuda"]
    accelerator: str
    peak_tflops: float | None = None
    flops_per_token: int
    parameters: int
    end_of_text_id: int
    loss_chunk_tokens: PositiveInt
    log_every_steps: PositiveInt
    heldout_every_steps: PositiveInt
    checkpoint_every_steps: PositiveInt
    keep_newest: PositiveInt
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
    """Write as TOML, aside and renamed. Values that are None are left out."""
    text = "# Written by kielo from the recipe and the machine; edit the recipe instead.\n"
    for name, part in resolved.model_dump(mode="json").items():
        text += _table(name, part)
    write_text_atomically(path, text)


def read(path: Path | str) -> Resolved:
    """Read what `write` wrote. Raises KieloError naming the file and the keys that do not fit."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise KieloError(f"{path}: cannot be read ({error.strerror}); `kielo plan RECIPE --resolve` writes it") from None
    except ValueError as error:
        raise KieloError(f"{path}: not valid TOML ({error}); delete it, `kielo train` writes it again") from None
    try:
        return Resolved.model_validate(content)
    except ValidationError as error:
        keys = ", ".join(".".join(map(str, entry["loc"])) for entry in error.errors())
        raise KieloError(f"{path}: does not fit this version of kielo ({keys}); delete it and resolve again") from None


def _table(name: str, content: dict[str, Any]) -> str:
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    lines = [f"{_key(key)} = {_value(value)}\n" for key, value in content.items() if value is not None and key not in tables]
    text = f"\n[{name}]\n" + "".join(lines)
    return text + "".join(_table(f"{name}.{_key(key)}", value) for key, value in tables.items())


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
