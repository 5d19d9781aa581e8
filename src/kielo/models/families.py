"""The model families Kielo knows, and how a Hugging Face `config.json` becomes a `[model]` section.

Torch-free: a login node plans with it. Data in: Hugging Face's model_type ("qwen3") or a `config.json`; data
out: one of the family's four files as a module, or a complete `recipe.sections.Model`.
"""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from kielo.models.hugging_face_config import normalise_rope
from kielo.recipe.errors import KieloError
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import Model

# Kinds of model that are similar to one of these, and the reason why each is refused.
_REFUSED = {
    "gemma3": "reads images too; only text models are known here: one whose config.json says gemma3_text "
    "(such as Gemma 3 270M and 1B)",
}


def module(model_type: str, part: Literal["count", "tensor_parallel_plan", "names", "model"]) -> ModuleType:
    """Imports one of a family's four files; only `model` imports torch. KieloError for an unknown family."""
    if model_type not in FAMILIES:
        raise KieloError(
            f"model.model_type = {model_type!r} is not a family here; known: {', '.join(FAMILIES)}"
        )
    return importlib.import_module(f"kielo.models.{FAMILIES[model_type].folder}.{part}")


def _by_class(config: dict[str, Any]) -> str | None:
    """Returns the family of a config without a model_type, by the classes of the remote code that it names.

    Those of LTG-BERT begin with Ltgbert (HPLT) or Norbert (NorBERT 3).
    """
    named = (config.get("architectures"), config.get("auto_map"))
    return "ltg_bert" if any(word in str(named).lower() for word in ("ltgbert", "norbert")) else None


def build_model(config: Model) -> Any:
    """Builds the family's nn.Module for a complete `config`, on the default device. Imports torch."""
    return getattr(module(config.model_type, "model"), FAMILIES[config.model_type].class_name)(config)


def complete(model: Model, max_position_embeddings: int) -> Model:
    """Returns `model` with every key set that follows from others or is its family's default.

    vocab_size is left to the caller. Raises KieloError for a model.rope_scaling that does not fit.
    """
    defaults = module(model.model_type, "names").DEFAULTS
    base, scaling = normalise_rope(model.rope_theta, model.rope_scaling, max_position_embeddings)
    derived: dict[str, Any] = {
        "max_position_embeddings": max_position_embeddings,
        "num_key_value_heads": model.num_key_value_heads or model.num_attention_heads,
        "head_dim": model.head_dim or model.hidden_size // model.num_attention_heads,
        "rope_theta": base,
        "rope_scaling": scaling,
    }
    unset = {key: value for key, value in defaults.items() if getattr(model, key) is None}
    return model.model_copy(update=derived | unset)


def read_hf_config(path: str | Path) -> Model:
    """Reads a complete `Model` from a Hugging Face `config.json`, in the spelling of transformers 4 or 5.

    `path` is the file or the folder that holds it. Keys that do not change the maths are ignored; a key whose
    value asks for something Kielo does not do is refused by name.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KieloError(
            f"{path}: cannot be read ({error.strerror}); expected a Hugging Face config.json"
        ) from None
    except (ValueError, RecursionError) as error:
        raise KieloError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise KieloError(f"{path}: holds a {type(config).__name__}, and not the keys and values of a model")
    model_type = config.get("model_type") or _by_class(config)
    if not isinstance(model_type, str) or model_type not in {*FAMILIES, *_REFUSED}:
        raise KieloError(
            f"{path}: model_type = {model_type!r} is not a family here; known: {', '.join(FAMILIES)}"
        )
    if model_type in _REFUSED:
        raise KieloError(f"{path}: a model of model_type = {model_type!r} {_REFUSED[model_type]}")
    model = module(model_type, "names").from_hugging_face(config, str(path))
    try:
        module(model_type, "count").check(model)
    except KieloError as error:
        raise KieloError(f"{path}: {error}") from None
    return model
