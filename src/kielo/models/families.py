"""The model families Kielo knows, and how a Hugging Face `config.json` becomes a `[model]` section.

Torch-free: a login node plans with it. Data in: a family's word ("llama") or a `config.json`; data out: one of
the family's four files as a module, or a complete `recipe.sections.Model`.
"""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Model

# The family's word and folder → the class in its model.py.
FAMILIES: dict[str, str] = {"llama": "Llama"}

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# What transformers' LlamaConfig takes for a key that a config.json leaves out; our own defaults differ.
_HUGGING_FACE_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
}
_DEFAULT_ROPE_THETA = 10_000.0
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def module(model_type: str, part: Literal["count", "layout", "names", "model"]) -> ModuleType:
    """One of the four files of a family; only `model` imports torch. KieloError for a family that is not here."""
    if model_type not in FAMILIES:
        raise KieloError(f"model.model_type = {model_type!r} is not a family here; known: {', '.join(FAMILIES)}")
    return importlib.import_module(f"kielo.models.{model_type}.{part}")


def build_model(config: Model) -> Any:
    """The family's nn.Module for a complete `config`, on the default device. Imports torch."""
    return getattr(module(config.model_type, "model"), FAMILIES[config.model_type])(config)


def read_hf_config(path: str | Path) -> Model:
    """A complete `Model` from a Hugging Face Llama `config.json`, in the spelling of transformers 4 or 5.

    `path` is the file or the folder that holds it. Keys that do not change the maths are ignored; a key whose
    value asks for something Kielo does not do is refused by name.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KieloError(f"{path}: cannot be read ({error.strerror}); expected a Hugging Face config.json") from None
    except ValueError as error:
        raise KieloError(f"{path}: not valid JSON ({error})") from None
    _refuse_what_we_cannot_do(config, path)
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise KieloError(f"{path}: lacks {', '.join(missing)}, without which the model's shape is not known")

    values = {key: config[key] for key in _REQUIRED}
    for key, default in _HUGGING_FACE_DEFAULTS.items():
        values[key] = default if config.get(key) is None else config[key]
    values["num_key_value_heads"] = config.get("num_key_value_heads") or config["num_attention_heads"]
    values["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values["rope_theta"], values["rope_scaling"] = normalise_rope(
        config.get("rope_theta"),
        config.get("rope_parameters") or config.get("rope_scaling"),
        values["max_position_embeddings"],
        where=f"{path}: ",
    )
    return Model(model_type="llama", **values)


def normalise_rope(
    rope_theta: float | None, scaling: dict[str, Any] | None, max_position_embeddings: int, where: str = "model."
) -> tuple[float, dict[str, Any] | None]:
    """(base, scaling) in one spelling from any of Hugging Face's three.

    transformers 4 writes `rope_theta` beside `rope_scaling` {"type" or "rope_type", …}; transformers 5 writes
    `rope_parameters` with both inside. Out comes the base, and None ("default") or a dict of "rope_type" and
    just the numbers that type uses. KieloError for other types and for missing numbers.
    """
    scaling = dict(scaling or {})
    base = float(scaling.pop("rope_theta", None) or rope_theta or _DEFAULT_ROPE_THETA)
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in _ROPE_KEYS:
        raise KieloError(f"{where}rope_scaling.rope_type = {rope_type!r} is not supported; known: {', '.join(_ROPE_KEYS)}")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise KieloError(f"{where}partial_rotary_factor = {scaling['partial_rotary_factor']} is not supported; only 1.0")
    if rope_type == "default":
        return base, None
    if rope_type == "llama3":
        scaling.setdefault("original_max_position_embeddings", max_position_embeddings)
    missing = [key for key in _ROPE_KEYS[rope_type] if scaling.get(key) is None]
    if missing:
        raise KieloError(f"{where}rope_scaling of type {rope_type!r} lacks {', '.join(missing)}")
    return base, {"rope_type": rope_type} | {key: scaling[key] for key in _ROPE_KEYS[rope_type]}


def _refuse_what_we_cannot_do(config: dict[str, Any], path: Path) -> None:
    complaints = []
    if config.get("model_type") not in FAMILIES:
        complaints.append(f"model_type = {config.get('model_type')!r} (known: {', '.join(FAMILIES)})")
    architectures = config.get("architectures") or ["LlamaForCausalLM"]
    if "model_type" in config and config["model_type"] == "llama" and "LlamaForCausalLM" not in architectures:
        complaints.append(f"architectures = {architectures} (needed: LlamaForCausalLM)")
    if config.get("hidden_act", "silu") != "silu":
        complaints.append(f"hidden_act = {config['hidden_act']!r} (known: silu)")
    if config.get("quantization_config"):
        complaints.append("quantization_config (weights must be bf16, fp16 or fp32)")
    for key, harmless in (("attention_dropout", 0.0), ("partial_rotary_factor", 1.0)):
        if (config.get(key) if config.get(key) is not None else harmless) != harmless:
            complaints.append(f"{key} = {config[key]} (known: {harmless})")
    if complaints:
        raise KieloError(f"{path}: asks for what Kielo does not do: " + "; ".join(complaints))
