"""DeepSpeed's JSON: its settings, each listed, and contradictions with the arguments beside it."""

import json
from typing import Any

from kielo.recipe.from_script.bash_expansion import shown
from kielo.recipe.from_script.script_arguments import NOT_HONOURED, TRANSLATED, Translation, text_of_file

# Dotted key of the JSON → what it says of a run. Others are of DeepSpeed's code.
_READ = {
    "train_batch_size": "batch",
    "train_micro_batch_size_per_gpu": "micro",
    "gradient_accumulation_steps": "accumulation",
    "gradient_clipping": "clip",
    "zero_optimization.stage": "zero",
    "zero_optimization.offload_optimizer.device": "offload",
    "zero_optimization.offload_param.device": "offload_parameters",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "optimizer.type": "optimizer",
    "optimizer.params.lr": "lr",
    "optimizer.params.betas": "betas",
    "optimizer.params.eps": "eps",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.type": "scheduler",
}


def read_deepspeed(to: Translation, name: str) -> dict[str, Any]:
    """Return what the file of argument `name` says: _READ's words, and "precision". List all its settings."""
    if not to.has(name):
        return {}
    given = to.given[name]
    text = text_of_file(to.script, to.path, given.values[0])
    if text is None:
        to.refuse(
            f"{shown(given.values[0])} is not here, and has settings of the run. Fix: put it beside SCRIPT",
            name,
        )
        return {}
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("no table")
    except ValueError as error:
        to.refuse(f"{shown(given.values[0])} is no JSON ({error}). Fix: a valid file", name)
        return {}
    to.say(name, TRANSLATED, "its settings are below")
    return settings_of(to, content, f"{shown(given.values[0])}: ")


def settings_of(to: Translation, content: dict[str, Any], before: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in _flat(content):
        word = _READ.get(key)
        text = f"{before}{key} {json.dumps(value)}"
        if word is None:
            to.add_row("", text, NOT_HONOURED, "a setting of DeepSpeed's code")
        else:
            to.add_row("", text, TRANSLATED, "as the argument of the same meaning")
            if value != "auto":
                found[word] = value
    for precision in ("fp16", "bf16"):
        if found.pop(precision, False) is True:
            found["precision"] = precision
    _agree(to, found)
    return found


# Word → the key, and the arguments that say the same.
_KEYS = {
    "clip": ("train.max_gradient_norm", ("--clip-grad", "--max_grad_norm")),
    "lr": ("train.learning_rate", ("--lr", "--learning_rate")),
    "eps": ("train.adam_epsilon", ("--adam-eps", "--adam_epsilon")),
    "weight_decay": ("train.weight_decay", ("--weight-decay", "--weight_decay")),
}


def fill(to: Translation, found: dict[str, Any]) -> None:
    """Take the numbers of the file that no argument gives."""
    pairs = {
        key: found[word]
        for word, (key, names) in _KEYS.items()
        if word in found and not any(map(to.has, names))
    }
    if isinstance(betas := found.get("betas"), list) and len(betas) == 2:
        given = any(map(to.has, ("--adam-beta1", "--adam_beta1", "--adam-beta2", "--adam_beta2")))
        pairs |= {} if given else {"train.adam_beta1": betas[0], "train.adam_beta2": betas[1]}
    for key, value in pairs.items():
        if isinstance(value, int | float):
            to.put(key, value, origin="DeepSpeed's file")
    kind = str(found.get("optimizer", "adamw")).lower()
    if kind not in ("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam"):
        to.add_default("optimizer", f"changes the training: there is no {kind}; the recipe has AdamW")


def _agree(to: Translation, found: dict[str, Any]) -> None:
    """Refuse numbers of the file that differ from the arguments'."""
    pairs = {
        "batch": ("--global-batch-size",),
        "micro": ("--micro-batch-size", "--per_device_train_batch_size"),
        "accumulation": ("--gradient_accumulation_steps",),
    } | {word: names for word, (_, names) in _KEYS.items()}
    for word, names in pairs.items():
        for name in names:
            if word in found and to.has(name) and to.value(name) != found[word]:
                to.refuse(f"DeepSpeed's file has {found[word]}. Fix: one value", name)


def _flat(content: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in content.items():
        pairs += (
            _flat(value, f"{before}{key}.") if isinstance(value, dict) and value else [(before + key, value)]
        )
    return pairs
