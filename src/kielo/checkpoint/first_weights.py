"""The weights that a run starts from: `model.weights`, with its own vocabulary by `model.transplant`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from kielo.artifact.json_object import JsonTable
from kielo.artifact.stage_json import read_stage_json
from kielo.artifact.tokenizer_files import RowMap
from kielo.artifact.weights_folder import resolve_weights
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.hugging_face_import import load_model_weights
from kielo.checkpoint.source_settings import read_settings
from kielo.checkpoint.transplant import Transplant
from kielo.models import families
from kielo.models.piece import Box
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import CompleteModel
from kielo.resolve.resolved import Identity, Placement
from kielo.tokenizer.facts import tokenizer_hash
from kielo.tokenizer.trial import refuse_other_vocabulary


def load_first_weights(
    parameters: Mapping[str, Tensor], identity: Identity, placement: Placement, group: Any = None
) -> dict[str, str]:
    """Fill `parameters` from `model.weights`. Return and raise as `load_weights`, and for a wrong row map."""
    model = identity.model
    source, folder = _source(model), Path(placement.tokenizer_folder)
    if model.transplant is None:
        Agreement(group).on_first(lambda: refuse_other_vocabulary(folder, source, str(folder)))
        return load_model_weights(parameters, source, model, group)
    row_map = Agreement(group).on_first(lambda: _row_map(folder, source, model))
    initial_value = families.module(model.model_type, "model").initial_value

    def first_value(name: str, shape: Sequence[int], box: Box) -> Tensor:
        return initial_value(name, shape, model, identity.seed, box)

    return load_model_weights(parameters, source, model, group, Transplant(row_map, first_value))


def first_settings(identity: Identity, placement: Placement, group: Any = None) -> JsonTable:
    """Read the settings of `model.weights` (`read_settings`), on rank 0 for all ranks of `group`."""
    source, folder = _source(identity.model), Path(placement.tokenizer_folder)
    return Agreement(group).on_first(lambda: read_settings(source, folder))


def _source(model: CompleteModel) -> Path:
    if model.weights is None:
        raise ValueError("a model without model.weights begins from initial values")
    return resolve_weights(model.weights)


def _row_map(folder: Path, source: Path, model: CompleteModel) -> RowMap:
    row_map = read_stage_json(folder, RowMap)
    again, file = "Fix: `kielo run RECIPE --to pack`", folder / RowMap.FILE_NAME
    if row_map is None:
        raise KieloError(f"{folder}: has no {RowMap.FILE_NAME}, which model.transplant needs. {again}")
    if row_map.method != model.transplant:
        raise KieloError(
            f"{file}: is of model.transplant = {row_map.method!r}, and the recipe has {model.transplant!r}. "
            f"{again}"
        )
    if row_map.old_tokenizer != tokenizer_hash(source):
        raise KieloError(f"{file}: is of another old tokenizer than the tokenizer in {source}. {again}")
    if len(row_map.rows) != model.vocab_size:
        raise KieloError(
            f"{file}: has {len(row_map.rows):,} rows for a vocabulary of {model.vocab_size:,}. {again}"
        )
    return row_map
