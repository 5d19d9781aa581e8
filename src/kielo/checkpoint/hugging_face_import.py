"""Import of weights: a folder's files → parameters of any layout, cast to their dtype.

The folder has Hugging Face's files, or is a Megatron checkpoint with tables as if it had them.

A rank reads only the bytes of its own shards, through two buffers of 32 MiB, so nothing runs out of memory.
Rank 0 reads the files' tables, which all ranks check before a byte of any parameter changes. A run's first
weights are `model.weights`, with its own vocabulary by `model.transplant`.
"""

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kielo.artifact import megatron_folder
from kielo.artifact.json_object import JsonTable
from kielo.artifact.stage_counts import RowMap
from kielo.artifact.stage_json import read_stage_json
from kielo.artifact.weights_folder import CONFIG_FILE, resolve_weights, weight_files
from kielo.checkpoint import megatron_tables
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.export_tensors import row_boxes
from kielo.checkpoint.megatron_optimiser import AdamState, adam_facts
from kielo.checkpoint.read_checkpoint import some_names
from kielo.checkpoint.save_plan import tied_names
from kielo.checkpoint.source_settings import read_settings
from kielo.checkpoint.split_tensor import SplitTensor, read_parts
from kielo.checkpoint.tensor_file import ReadBuffers, Wanted
from kielo.checkpoint.tensor_table import is_finite, moved, read_table
from kielo.checkpoint.transplant import Source, Transplant
from kielo.models import families
from kielo.models.piece import Box, Piece, by_stored_name, stored_shape
from kielo.parallel.materialise import local, local_slices
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import CompleteModel
from kielo.resolve.resolved import Identity, Placement
from kielo.tokenizer.load import tokenizer_hash
from kielo.tokenizer.trial import refuse_other_vocabulary

logger = logging.getLogger(__name__)

_FLOATS = ("F64", "F32", "F16", "BF16")
# A tensor's name in the folder → its place in one file, or in several.
StoredTensors = dict[str, SplitTensor]
Places = Mapping[str, tuple[str, SplitTensor]]  # family's name → (name there, its place)
Pieces = Mapping[str, Piece]


@dataclass(frozen=True)
class Names:
    """Names in a folder beside the names of the model's own tensors."""

    base_prefix: str = ""  # which names lack in files of the bare base model
    # Our name of a parameter → the tensor of a tied head, which files may have too or in its place.
    tied: Mapping[str, str] = field(default_factory=dict)
    can_untie: bool = True  # the family's head can be a matrix of its own
    ignored: Sequence[str] = ()  # patterns of names that are no weights


_NO_OTHER_NAMES = Names()


def load_model_weights(
    parameters: Mapping[str, Tensor],
    source: Path,
    model: CompleteModel,
    group: Any = None,
    transplant: Transplant | None = None,
    stored: CompleteModel | None = None,
    state: AdamState | None = None,
) -> dict[str, str]:
    """Call `load_weights` with the family's names. stored: the folder's model, if it has more layers."""
    pieces = families.module(model.model_type, "tables").to_hugging_face(model)
    names = _other_names(model, stored or model)
    return load_weights(parameters, source, pieces, group, names, transplant, state)


def _other_names(model: CompleteModel, stored: CompleteModel) -> Names:
    names, tied, untied = families.module(model.model_type, "tables"), {}, model
    if model.tie_word_embeddings:
        untied = model.model_copy(update={"tie_word_embeddings": False})
        tied["embed.weight"] = names.to_hugging_face(untied)["head.weight"].name
    can_untie = next(families.model_complaints(untied), None) is None
    prefix, read = names.BASE_MODEL_PREFIX, names.to_hugging_face(model)
    others = {piece.name for ours, piece in names.to_hugging_face(stored).items() if ours not in read}
    not_read = (f"^({re.escape(prefix)})?{re.escape(name.removeprefix(prefix))}$" for name in others)
    return Names(prefix, tied, can_untie, (*names.IGNORED, *not_read))


def load_weights(
    parameters: Mapping[str, Tensor],
    source: Path,
    pieces: Mapping[str, Piece],
    group: Any = None,
    other_names: Names = _NO_OTHER_NAMES,
    transplant: Transplant | None = None,
    state: AdamState | None = None,
) -> dict[str, str]:
    """Fill `parameters` (our name → Tensor or DTensor, any layout and device) from the folder `source`.

    `pieces` is a family's `to_hugging_face`. Padding rows become zero. A tied parameter without a tensor is
    read from its head's tensor. `transplant` makes the vocabulary's rows. None: the files have them.
    state: a tensor of Adam in place of each weight, of a Megatron checkpoint.

    Return the source's name of each weight and its dtype there, {"lm_head.weight": "BF16"}, the same on all
    ranks of `group`. Raise KieloError on all of them, naming tensors that are missing, not expected, of
    another shape or not finite, tied tensors that differ, and damaged files.
    """
    ranks = Agreement(group)
    found: StoredTensors = ranks.on_first(lambda: read_tables(Path(source), state))
    names = dict[str, str]()
    for ours, piece in pieces.items():
        known_as = (piece.name, piece.name.removeprefix(other_names.base_prefix), other_names.tied.get(ours))
        if (known := next((name for name in known_as if name in found), None)) is not None:
            names[piece.name] = known
    tied = tied_names(parameters)
    wanted = {ours: pieces.get(ours, Piece(ours)) for ours in parameters}
    wanted = {ours: piece for ours, piece in wanted.items() if piece.name in names or ours not in tied}
    weights = [*names.values(), *(name for name in other_names.tied.values() if name in found)]
    missing = list(dict.fromkeys(piece.name for piece in wanted.values() if piece.name not in names))
    extra = sorted(found.keys() - set(weights))
    extra = [name for name in extra if not any(re.search(other, name) for other in other_names.ignored)]
    complaint = None
    if missing:
        complaint = f"{source}: tensors of the model are missing: {some_names(missing)}"
    elif extra:
        complaint = f"{source}: tensors that the model does not have: {some_names(extra)}"
    places = {name: (known, found[known]) for name, known in names.items()}
    ranks.refuse_together(complaint or _misfit(parameters, wanted, places, transplant))
    ranks.on_first(lambda: _refuse_differing_head(pieces, names, found, other_names))
    not_finite = set[str]()
    try:
        not_finite = _fill(parameters, wanted, places, transplant)
    except KieloError as error:
        complaint = str(error)
    ranks.refuse_together(complaint)
    not_finite = set().union(*ranks.gather(not_finite))
    if not_finite:
        raise KieloError(ranks.on_first(lambda: _not_finite(sorted(not_finite), found)))
    dtypes = {name: found[name].dtype for name in weights}
    # An export has the embedding beside its head, because transformers 4 needs it.
    heads = set(other_names.tied.values())
    return dtypes | {piece: dtypes[name] for piece, name in names.items() if name in heads}


def read_tables(source: Path, state: AdamState | None = None) -> StoredTensors:
    """Read the tables of all files of a folder; KieloError for damaged, incomplete or contradictory files.

    A Megatron checkpoint has the tables that its export to Hugging Face's format would have. state: as in
    `load_weights`.
    """
    if megatron_folder.is_checkpoint(source):
        return megatron_tables.read_tables(source, state)
    found: StoredTensors = {}
    for path, indexed in weight_files(source).items():
        table = read_table(path)
        if absent := [name for name in indexed or () if name not in table]:
            raise KieloError(f"{path}: lacks {some_names(absent)}, which the index says are in it")
        for name in table.keys() & found.keys():
            raise KieloError(
                f"{path}: {name} is in this file and in {found[name].path.name}. Fix: remove the wrong file"
            )
        found |= {name: SplitTensor.of_file(path, stored) for name, stored in table.items()}
    return found


def _refuse_differing_head(
    pieces: Mapping[str, Piece], names: Mapping[str, str], found: StoredTensors, other_names: Names
) -> None:
    for ours, head in other_names.tied.items():
        name = names.get(pieces[ours].name)
        if head not in found or name is None or name == head or _are_equal(found[name], found[head]):
            continue
        path = found[head].path
        untie = f'"tie_word_embeddings": false in {path.parent / CONFIG_FILE}, which trains both; or '
        raise KieloError(
            f"{path}: {head} has other values than {name}, and config.json ties them: transformers 5 "
            f"computes with both, and transformers 4 without {head}. Fix: "
            f"{untie if other_names.can_untie else ''}remove {head} from the file, to train {name} as the "
            "head too"
        )


def _are_equal(one: SplitTensor, other: SplitTensor) -> bool:
    """Compare two stored tensors as fp32, block by block; NaN, which is refused later, equals NaN."""
    if one.shape != other.shape:
        return False
    pairs = zip(_blocks(one), _blocks(other), strict=True)
    return all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in pairs)


def _blocks(stored: SplitTensor) -> Iterator[Tensor]:
    buffers = ReadBuffers()
    for box in row_boxes(stored.shape):
        block = torch.empty([part.stop - part.start for part in box])
        read_parts(stored.wanted(box, block), buffers)
        yield block


def _misfit(
    parameters: Mapping[str, Tensor], wanted: Pieces, places: Places, transplant: Transplant | None
) -> str | None:
    for name, group in by_stored_name(wanted).items():
        name, stored = places[name]
        path = stored.path
        shapes = {ours: parameters[ours].shape for ours in group}
        expected = stored_shape(group, shapes)
        if transplant is not None and _has_vocabulary(group):
            expected = stored.shape
            if complaint := transplant.misfit(next(iter(shapes.values())), stored):
                return f"{path}: {name} {complaint}"
        if stored.shape != expected:
            ours = ", ".join(f"{ours} here is {list(shape)}" for ours, shape in shapes.items())
            if expected not in map(tuple, shapes.values()):
                ours += f", for which it should be {list(expected)}"
            return (
                f"{path}: {name} has the shape {list(stored.shape)}, but {ours}. Fix: the [model] section of "
                "this folder's config.json"
            )
        if stored.dtype not in _FLOATS:
            return f"{path}: {name} is stored as {stored.dtype}; known: {', '.join(_FLOATS)}"
    return None


def _fill(
    parameters: Mapping[str, Tensor], wanted: Pieces, places: Places, transplant: Transplant | None
) -> set[str]:
    """Fill this rank's shards. Return the names of tensors that are not finite in the part read here."""
    not_finite: set[str] = set()
    wanted_parts = list[tuple[str, Path, Wanted]]()
    buffers = ReadBuffers()
    for ours, piece in wanted.items():
        shard, box = local(parameters[ours]).detach(), local_slices(parameters[ours])
        name, stored = places[piece.name]
        if transplant is not None and _has_vocabulary({ours: piece}):
            source = Source(stored, buffers)
            if not transplant.fill(ours, parameters[ours].shape, shard, box, source):
                not_finite.add(name)
            continue
        if shard.numel() and piece.rows is not None:
            shard[max(0, piece.rows - box[0].start) :].zero_()
        for part, in_file in piece.boxes(box):
            target = shard[moved(part, [one.start for one in box])]
            target = target.mT if piece.transposed else target
            wanted_parts += ((name, path, one) for path, one in stored.wanted(in_file, target))
    read_parts(((path, one) for _, path, one in wanted_parts), buffers)
    not_finite |= {name for name, _, one in wanted_parts if not is_finite(one.target)}
    return not_finite


def _has_vocabulary(group: Mapping[str, Piece]) -> bool:
    """Return True for a tensor with a row for each token. Other tensors have no padding."""
    return any(piece.rows is not None for piece in group.values())


def _not_finite(names: Sequence[str], found: StoredTensors) -> str:
    stored = found[names[0]]
    num_bad = sum(block.numel() - int(block.isfinite().sum()) for block in _blocks(stored))
    others = f" (also {len(names) - 1} more, such as {names[1]})" if len(names) > 1 else ""
    numbers = f"{num_bad:,} of {math.prod(stored.shape):,} numbers"
    return (
        f"{stored.path}: {names[0]} has {numbers} that are NaN, infinite or beyond fp32{others}. Fix: fetch "
        "the published file again, or take older weights"
    )


def load_first_weights(
    parameters: Mapping[str, Tensor], identity: Identity, placement: Placement, group: Any = None
) -> dict[str, str]:
    """Fill `parameters` from `model.weights`. Return and raise as `load_weights`, and for a wrong row map."""
    model = identity.model
    source, folder = _source(model), Path(placement.tokenizer_folder)
    if model.transplant is None:
        Agreement(group).on_first(lambda: refuse_other_vocabulary(folder, source, str(folder)))
        state: AdamState | None = None
        if identity.train.optimiser_from_weights:
            Agreement(group).on_first(lambda: adam_facts(source))  # refuses a partial state
            state = "fp32"
        loaded = load_model_weights(parameters, source, model, group, state=state)
        if state is None:
            return loaded
        stored = Agreement(group).on_first(lambda: read_tables(source))  # an export has the model's dtypes
        return {name: stored[name].dtype if name in stored else dtype for name, dtype in loaded.items()}
    row_map = Agreement(group).on_first(lambda: _row_map(folder, source, model))
    initial_value = families.module(model.model_type, "model").initial_value

    def first_value(name: str, shape: Sequence[int], box: Box) -> Tensor:
        return initial_value(name, shape, model, identity.seed, box)

    return load_model_weights(parameters, source, model, group, Transplant(row_map, first_value))


def load_first_moments(moments: Mapping[str, Tensor], identity: Identity, group: Any = None) -> int:
    """Fill Adam's `moments` ("<parameter>/exp_avg") from `model.weights`. Return the updates made there.

    Raise KieloError if the files do not have them whole, and as `load_weights`.
    """
    source, train = _source(identity.model), identity.train
    facts = Agreement(group).on_first(lambda: adam_facts(source))
    states: tuple[AdamState, ...] = ("exp_avg", "exp_avg_sq")
    for state in states:
        ending = f"/{state}"
        of_state = {k.removesuffix(ending): one for k, one in moments.items() if k.endswith(ending)}
        load_model_weights(of_state, source, identity.model, group, state=state)
    ours = (train.adam_beta1, train.adam_beta2, train.adam_epsilon)
    if Agreement(group).rank == 0 and facts.settings not in (None, ours):
        logger.warning(
            "%s: Adam had (beta1, beta2, epsilon) = %s, and the recipe has %s", source, facts.settings, ours
        )
    return facts.updates


def first_settings(identity: Identity, placement: Placement, group: Any = None) -> JsonTable:
    """Read the settings of `model.weights` (`read_settings`), on rank 0 for all ranks of `group`."""
    source, folder = _source(identity.model), Path(placement.tokenizer_folder)
    return Agreement(group).on_first(lambda: read_settings(source, folder))


def _source(model: CompleteModel) -> Path:
    if model.weights is None:
        raise ValueError("a model without model.weights begins from initial values")
    return resolve_weights(model.weights)


def _row_map(folder: Path, source: Path, model: CompleteModel) -> RowMap:
    row_map, name = read_stage_json(folder, RowMap), RowMap.FILE_NAME
    if row_map is None:
        what = f": has no {name}, which model.transplant needs"
    elif row_map.method != model.transplant:
        what = (
            f"/{name}: is of model.transplant = {row_map.method!r}, and the recipe has {model.transplant!r}"
        )
    elif row_map.old_tokenizer != tokenizer_hash(source):
        what = f"/{name}: is of another old tokenizer than the tokenizer in {source}"
    elif len(row_map.rows) != model.vocab_size:
        what = f"/{name}: has {len(row_map.rows):,} rows for a vocabulary of {model.vocab_size:,}"
    else:
        return row_map
    raise KieloError(f"{folder}{what}. Fix: `kielo run RECIPE --to pack`")
