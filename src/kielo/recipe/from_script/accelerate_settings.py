"""The settings of `accelerate launch`: its YAML, and the arguments of the launcher, which win over it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from kielo.recipe.from_script.bash_expansion import shown, unknown_names
from kielo.recipe.from_script.script_arguments import (
    NOT_HONOURED,
    TRANSLATED,
    Table,
    Translation,
    read_arguments,
    text_of_file,
)

# Settings that say something of a run → what it is. Others are of accelerate's code.
_READ = {
    "num_processes": "the job's devices",
    "num_machines": "the job's nodes",
    "mixed_precision": "train.precision",
    "distributed_type": "layout.zero",
    "use_deepspeed": "layout.zero",
    "use_fsdp": "layout.zero",
    "zero_stage": "layout.zero",
    "fsdp_sharding_strategy": "layout.zero",
    "fsdp_reshard_after_forward": "layout.zero",
    "fsdp_offload_params": "layout.cpu_offload",
    "fsdp_activation_checkpointing": "layout.recompute",
    "offload_optimizer_device": "layout.cpu_offload",
    "offload_param_device": "layout.cpu_offload",
    "gradient_accumulation_steps": "train.tokens_per_step",
    "gradient_clipping": "train.max_gradient_norm",
    "deepspeed_config_file": "its settings are below",
}
_STRATEGIES = {"1": 3, "FULL_SHARD": 3, "2": 2, "SHARD_GRAD_OP": 2, "3": 1, "NO_SHARD": 1, "4": 3,
               "HYBRID_SHARD": 3, "5": 2, "HYBRID_SHARD_ZERO2": 2}  # fmt: skip
_MOST_SETTINGS = 500


@dataclass
class Accelerate:
    """The settings by their last names. text of a value: as YAML has it."""

    settings: dict[str, Any] = field(default_factory=dict)

    def number(self, name: str) -> int | None:
        text = str(self.settings.get(name, ""))
        return int(text) if text.isdecimal() and int(text) else None

    def is_on(self, name: str) -> bool:
        return str(self.settings.get(name, "")).lower() in ("true", "yes", "1")

    @property
    def engine(self) -> str:
        kind = str(self.settings.get("distributed_type", "")).lower()
        if kind == "deepspeed" or self.is_on("use_deepspeed"):
            return "deepspeed"
        return "fsdp" if kind == "fsdp" or self.is_on("use_fsdp") else "ddp"

    @property
    def zero(self) -> int | None:
        """Return layout.zero, or None if the settings do not say it."""
        if self.engine == "deepspeed" and self.number("zero_stage"):
            return self.number("zero_stage")
        if self.engine != "fsdp":
            return None
        strategy = self.settings.get(
            "fsdp_sharding_strategy", self.settings.get("fsdp_reshard_after_forward", "1")
        )
        return {"false": 2, "true": 3}.get(str(strategy).lower(), _STRATEGIES.get(str(strategy).upper(), 3))

    @property
    def is_hybrid(self) -> bool:
        return self.engine == "fsdp" and str(self.settings.get("fsdp_sharding_strategy")).upper() in (
            "4", "5", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2",
        )  # fmt: skip

    @property
    def offloads(self) -> bool:
        """Return True if state is on the CPU. DeepSpeed moves parameters only at stage 3."""
        if self.engine == "deepspeed":
            parameters = self.zero == 3 and self.settings.get("offload_param_device") == "cpu"
            return parameters or self.settings.get("offload_optimizer_device") == "cpu"
        return self.engine == "fsdp" and self.is_on("fsdp_offload_params")

    @property
    def recomputes(self) -> bool:
        return self.is_on("fsdp_activation_checkpointing")

    @property
    def precision(self) -> str:
        kind = str(self.settings.get("mixed_precision", "no")).lower()
        return kind if kind in ("bf16", "fp16", "fp8") else ""

    @property
    def per_node(self) -> int | None:
        devices = self.number("num_processes")
        return devices // (self.number("num_machines") or 1) if devices else None

    @property
    def deepspeed_file(self) -> str:
        return str(self.settings.get("deepspeed_config_file", ""))


def read_accelerate(
    to: Translation, words: Sequence[tuple[str, str]]
) -> tuple[Accelerate, list[tuple[str, str]]]:
    """Return the settings, and the words of the launcher that are none of them."""
    found = Accelerate()
    if not any(
        word.rpartition("/")[2] == "accelerate" or word.startswith("accelerate.") for word, _ in words
    ):
        return found, list(words)
    rest: list[tuple[str, str]] = []
    given_here: dict[str, Any] = {}
    for given in read_arguments(words, Table({}, {}, {}, {}, {})):
        name = given.name.lstrip("-").replace("-", "_")
        if name == "config_file" and given.values:
            _read_yaml(to, found.settings, given.values[0], given.place)
            to.add_row(given.place, given.text, TRANSLATED, "its settings are below")
        elif name in _READ and not any(map(unknown_names, given.values)):
            given_here[name] = given.values[0] if given.values else True
            to.add_row(given.place, given.text, TRANSLATED, _READ[name])
        else:
            rest += [(word, given.place) for word in (given.written, *given.values)]
    found.settings |= given_here
    return found, rest


def _read_yaml(to: Translation, settings: dict[str, Any], name: str, place: str) -> None:
    text = text_of_file(to.script, to.path, name)
    if text is None:
        to.complaints.append(
            f"line {place}: --config_file {shown(name)} is not here, and has settings of the run. Fix: put "
            "it beside the script"
        )
        return
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        to.complaints.append(
            f"line {place}: {shown(name)} is no YAML ({str(error).splitlines()[0]}). Fix: a valid file"
        )
        return
    pairs = _last_names(content) if isinstance(content, dict) else []
    if not pairs or len(pairs) >= _MOST_SETTINGS:
        to.complaints.append(f"line {place}: {shown(name)} is no file of accelerate. Fix: accelerate config")
    for key, value in pairs:
        settings[key] = value
        verdict, meaning = (
            (TRANSLATED, _READ[key]) if key in _READ else (NOT_HONOURED, "a setting of accelerate's code")
        )
        to.add_row("", f"{shown(name)}: {key} {value}", verdict, meaning)


def _last_names(content: Mapping[str, Any]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in content.items():
        if len(pairs) >= _MOST_SETTINGS:
            break
        pairs += _last_names(value) if isinstance(value, dict) else [(str(key), value)]
    return pairs
