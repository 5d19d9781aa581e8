"""The model families Kielo knows, and the `[model]` section of a Hugging Face `config.json`; torch-free."""

import importlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from kielo.artifact import megatron_folder
from kielo.artifact.json_object import JsonTable
from kielo.models import config_keys, megatron_config
from kielo.models.rope_scaling import normalise_rope
from kielo.recipe.errors import KieloError
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import CompleteModel, Model

# Kinds of model that are similar to a known kind, and the reason why each is refused.
_REFUSED = {
    "gemma3": "reads images too, and Kielo knows text models only. Fix: a model whose config.json says "
    "gemma3_text (such as Gemma 3 270M and 1B)",
}
# Keys under which models of several parts keep the text model's own config.
_NESTED = ("text_config", "llm_config", "language_config")


def module(model_type: str, part: Literal["tables", "model"]) -> ModuleType:
    """Import a family's tables, or its model, which imports torch. KieloError for an unknown family."""
    if model_type not in FAMILIES:
        raise KieloError(f"model.model_type = {model_type!r} is not known. Fix: one of {', '.join(FAMILIES)}")
    return importlib.import_module(f"kielo.models.{FAMILIES[model_type].folder}.{part}")


def build_model(config: CompleteModel) -> Any:
    """Build the family's nn.Module on the default device. KieloError for a config that does not fit."""
    check(config)
    return getattr(module(config.model_type, "model"), FAMILIES[config.model_type].class_name)(config)


def config_entries(model_type: str) -> tuple[config_keys.Entry, ...]:
    return module(model_type, "tables").KEYS[model_type]


def keys_of_family(model_type: str) -> set[str]:
    return {key for entry in config_entries(model_type) for key in entry.ours}


def family_defaults(model_type: str) -> dict[str, object]:
    """Return the family's values of keys of [model] that are unset."""
    return {key: value for entry in config_entries(model_type) for key, value in entry.defaults().items()}


def check(model: CompleteModel) -> None:
    """Raise KieloError with all of `model_complaints`."""
    if complaints := list(model_complaints(model)):
        raise KieloError("; ".join(complaints))


def model_complaints(model: CompleteModel, given: Collection[str] = ()) -> Iterator[str]:
    """Yield the keys that do not fit the model or the family, with reasons. given: a recipe's keys."""
    parts = module(model.model_type, "tables").layer_parts(model)
    if parts.is_rotary and model.head_dim % 2:
        yield f"model.head_dim = {model.head_dim} is odd; rotary positions need pairs"
    if model.num_attention_heads % model.num_key_value_heads:
        yield (
            f"model.num_attention_heads = {model.num_attention_heads} is no multiple of "
            f"model.num_key_value_heads = {model.num_key_value_heads}"
        )
    if model.layer_types is not None and len(model.layer_types) != model.num_hidden_layers:
        yield (
            f"model.layer_types has {len(model.layer_types)} entries for model.num_hidden_layers = "
            f"{model.num_hidden_layers}"
        )
    if "sliding_attention" in (model.layer_types or ()) and model.sliding_window is None:
        yield "model.layer_types has sliding_attention, but model.sliding_window is not set"
    for key in config_keys.foreign_keys(model, keys_of_family(model.model_type), given):
        theirs = [name for name in FAMILIES if key in keys_of_family(name)]
        yield (
            f"model.{key} = {getattr(model, key)!r}: {model.model_type} models do not have it; it is of "
            f"{', '.join(theirs)}. Fix: leave the key out"
        )
    for entry in config_entries(model.model_type):
        yield from entry.complaints(model)


# Keys that a recipe may leave out, and every model has.
_OF_EVERY_MODEL = [name for name, field in CompleteModel.model_fields.items() if field.is_required()]


def complete(model: Model, max_position_embeddings: int) -> CompleteModel:
    """Return `model` with the keys set that follow from other keys or have a default of the family."""
    defaults = family_defaults(model.model_type)
    base, scaling = normalise_rope(model.rope_theta, model.rope_scaling, max_position_embeddings)
    derived: dict[str, object] = {
        "max_position_embeddings": max_position_embeddings,
        "num_key_value_heads": model.num_key_value_heads or model.num_attention_heads,
        "head_dim": model.head_dim or model.hidden_size // model.num_attention_heads,
        "rope_theta": base,
        "rope_scaling": scaling,
    }
    own = keys_of_family(model.model_type)
    unset = {key: value for key, value in defaults.items() if getattr(model, key) is None}
    changes = {key: derived[key] for key in derived if key in own} | unset
    values = dict(model) | changes
    if missing := [f"model.{key} is not set" for key in _OF_EVERY_MODEL if values[key] is None]:
        raise KieloError("; ".join(missing))
    return CompleteModel.model_construct(model.model_fields_set | set(changes), **values)


def read_hf_config(path: str | Path) -> CompleteModel:
    """Read the model of a Hugging Face `config.json` (the file, or in the folder), of transformers 4 or 5.

    A folder can also be a Megatron checkpoint, whose arguments are the model.
    """
    model_type, config, where = _config_json(path)
    model = model_of_config(model_type, config, where)
    try:
        check(model)
    except KieloError as error:
        raise KieloError(f"{where}: {error}") from None
    return model


def keys_passed_over(path: str | Path) -> list[str]:
    """Return the keys of a config.json that neither Kielo nor transformers has for this family."""
    model_type, config, where = _config_json(path)
    return config_keys.read_config(config_entries(model_type), config, model_type, where)[1]


def _config_json(path: str | Path) -> tuple[str, dict[str, object], str]:
    path = Path(path)
    if path.is_dir() and megatron_folder.is_checkpoint(path):
        return megatron_config.read_config(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"cannot be read ({error.strerror}): expected a Hugging Face config.json"
        raise KieloError(f"{path}: {reason}") from None
    except (ValueError, RecursionError) as error:
        raise KieloError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise KieloError(f"{path}: contains a {type(config).__name__}, not the keys and values of a model")
    classes = str((config.get("architectures"), config.get("auto_map"))).lower()
    # LTG-BERT's published files have no model_type, but name the classes of their remote code.
    of_classes = "ltg_bert" if "ltgbert" in classes or "norbert" in classes else None
    model_type = config.get("model_type") or of_classes
    if not isinstance(model_type, str) or model_type not in {*FAMILIES, *_REFUSED}:
        raise KieloError(
            f"{path}: model_type = {model_type!r} is not known. Fix: one of {', '.join(FAMILIES)}"
        )
    if model_type in _REFUSED:
        raise KieloError(f"{path}: a model of model_type = {model_type!r} {_REFUSED[model_type]}")
    if nested := [key for key in _NESTED if isinstance(config.get(key), dict)]:
        raise KieloError(
            f"{path}: {nested[0]} has the keys of the text model, which are read at the top level only. "
            f"Fix: a folder with the content of {nested[0]} as its config.json"
        )
    return model_type, config, str(path)


def model_of_config(model_type: str, config: Mapping[str, object], where: str) -> CompleteModel:
    """Return the model of the config.json at `where`. Raise KieloError with every complaint."""
    return config_keys.read_config(config_entries(model_type), config, model_type, where)[0]


def hf_config(
    model: CompleteModel,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    dtype: str = "float32",
) -> JsonTable:
    """Return an export's config.json, which transformers 4 and 5 read. `dtype` is the weights'."""
    family = FAMILIES[model.model_type]
    written: JsonTable = {"model_type": model.model_type} if family.in_transformers else {}
    for entry in config_entries(model.model_type):
        written |= entry.write(model)
    written |= {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    if family.is_encoder:
        last = eos_token_id[0] if isinstance(eos_token_id, list) else eos_token_id
        written |= {"cls_token_id": bos_token_id, "sep_token_id": last}
    else:
        written["use_cache"] = True
    return written | {"torch_dtype": dtype}
