"""The tensors of a Megatron checkpoint under Hugging Face's names: each a list of places in the ranks' files.

So everything after it reads a Megatron checkpoint as it reads Hugging Face's files: in any layout, by slices,
in bounded memory. Only the files' tables are read here.

Tensor ranks have rows of the vocabulary, of queries with their keys and values, and of the MLP's first
matrix, and columns of attention's and the MLP's output. Vectors are on every rank. The fused rows of queries,
keys and values changed their order with `checkpoint_version`.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kielo.artifact import megatron_folder
from kielo.artifact.megatron_folder import Arguments
from kielo.artifact.torch_archive import TorchArchive
from kielo.checkpoint import megatron_distributed
from kielo.checkpoint.megatron_optimiser import AdamState, moved_to_optimiser
from kielo.checkpoint.read_checkpoint import some_names
from kielo.checkpoint.split_tensor import FilePart, SplitTensor, assembled, joined, read_parts
from kielo.checkpoint.tensor_table import whole_box
from kielo.checkpoint.torch_tensors import tensors_of
from kielo.models import families
from kielo.models.piece import by_stored_name, stored_shape
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import CompleteModel

logger = logging.getLogger(__name__)

# Modules of a layer under Megatron-LM's names, its core's, and transformer-engine's.
_MODULES = {
    "input_layernorm": "attention_norm",
    "input_norm": "attention_norm",
    "self_attention.query_key_value": "qkv",
    "attention.query_key_value": "qkv",
    "self_attention.linear_qkv": "qkv",
    "self_attention.layernorm_qkv": "qkv",
    "self_attention.dense": "attention.o",
    "attention.dense": "attention.o",
    "self_attention.linear_proj": "attention.o",
    "self_attention.proj": "attention.o",
    "self_attention.q_layernorm": "attention.q_norm",
    "self_attention.k_layernorm": "attention.k_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_norm": "mlp_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.dense_h_to_4h": "fc1",
    "mlp.linear_fc1": "fc1",
    "layernorm_mlp.fc1": "fc1",
    "mlp.dense_4h_to_h": "mlp.down",
    "mlp.linear_fc2": "mlp.down",
    "layernorm_mlp.fc2": "mlp.down",
}
# Norms that are stored with the matrix that reads their output.
_FUSED_NORMS = {"qkv": "attention_norm", "fc1": "mlp_norm", "layernorm_mlp": "mlp_norm"}
_ENDS = {
    "embedding.word_embeddings": "embed",
    "word_embeddings": "embed",
    "embedding.position_embeddings": "position_table",
    "position_embeddings": "position_table",
    "embedding.word_embeddings.norm": "embed_norm",
    "word_embeddings.norm": "embed_norm",
    "final_layernorm": "norm",
    "final_norm": "norm",
    "output_layer": "head",
    "lm_head": "head",
}
_STACK = re.compile(r"^(?:language_model\.)?(?:encoder|transformer|decoder)\.")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
# Tensors that are computed here, are no weights, or are a copy of the embedding for the last stage.
_IGNORED = re.compile(
    r"_extra_state|rotary_pos_emb|rotary_emb\.inv_freq|masked_bias|word_embeddings_for_head"
)
_SPLIT_ROWS, _SPLIT_COLUMNS = ("embed", "head", "qkv", "fc1"), ("attention.o", "mlp.down")

# Our name ("layers.3.qkv.weight") → the tensor of each tensor rank; one entry if the file has it whole.
Shards = dict[str, list[SplitTensor]]


def read_tables(folder: Path, state: AdamState | None = None) -> dict[str, SplitTensor]:
    """Return Hugging Face's name → tensor. Raise KieloError for files that are missing, mixed or damaged.

    state: a tensor of the optimiser in place of each weight, for a checkpoint without `optimiser_obstacle`.
    """
    arguments, model = megatron_folder.read_arguments(folder), families.read_hf_config(folder)
    kind = megatron_folder.format_of(folder)
    if kind == "legacy":
        shards = _of_ranks(megatron_folder.rank_files(folder), arguments, state)
    elif kind == "whole":
        shards = _of_ranks(megatron_folder.states_files(folder), arguments)
    elif kind == "layers":
        shards = _of_layers(megatron_folder.layer_files(folder))
    elif kind == "universal":
        shards = _of_universal(megatron_folder.parameter_files(folder, state or "fp32"), arguments)
    else:
        shards = _of_distributed(folder)
    _refuse_incomplete(folder, shards, model)
    _tell_of_differences(folder, shards)
    version = arguments.checkpoint_version
    if version is None:
        version = 0.0 if kind == "legacy" else 3.0
    parameters = dict(_parameters(shards, model, version))
    return _under_their_names(folder, parameters, model)


def _of_ranks(
    files: Mapping[tuple[int, int], Path], first: Arguments, state: AdamState | None = None
) -> Shards:
    """Join the files of tensor and pipeline ranks. A rank's chunks (virtual stages) follow round by round."""
    ranks, stages = (1 + max(numbers) for numbers in zip(*files, strict=True))
    found = dict[tuple[int, int, int], dict[str, SplitTensor]]()  # (chunk, stage, tensor rank)
    for (rank, stage), path in files.items():
        archive = megatron_folder.read_file(path)
        _refuse_mixed(first, megatron_folder.arguments_of(archive), {"tensor": ranks, "pipeline": stages})
        chunks = list(_chunks(archive))
        if state is not None:
            chunks = moved_to_optimiser(archive, chunks, state)
        for chunk, tensors in enumerate(chunks):
            found[chunk, stage, rank] = tensors
    rounds = 1 + max(chunk for chunk, _, _ in found)
    shards, layers = Shards(), 0
    for chunk in range(rounds):
        for stage in range(stages):
            absent = [rank for rank in range(ranks) if (chunk, stage, rank) not in found]
            if absent:
                raise KieloError(f"{files[absent[0], stage]}: has fewer virtual stages than other files")
            tables = [found[chunk, stage, rank] for rank in range(ranks)]
            _refuse_other_names([files[rank, stage] for rank in range(ranks)], tables)
            layers += _add(shards, tables, layers)
    return shards


def _chunks(archive: TorchArchive) -> Iterator[dict[str, SplitTensor]]:
    """Yield the tensors of each virtual stage, `model`, or `model0` and so on."""
    content = archive.content
    names = ["model"] if "model" in content else [name for name in ("module",) if content.get(name)]
    if not names:
        names = sorted((name for name in content if re.fullmatch(r"model\d+", str(name))), key=_number)
    if not names:
        raise KieloError(f"{archive.path}: has no model; found: {some_names(sorted(map(str, content)))}")
    for name in names:
        yield tensors_of(archive, content[name])


def _number(name: str) -> int:
    return int(name.removeprefix("model"))


def _refuse_mixed(first: Arguments, other: Arguments, grid: Mapping[str, int]) -> None:
    for name, files in grid.items():
        if (said := other.degrees.get(name, files)) != files:
            raise KieloError(
                f"{other.path}: was saved with {name} degree {said}, but the files here are of {files} "
                f"{name} ranks: they are of two trainings, or some are missing. Fix: copy the iteration again"
            )
    for key in ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size", "seq_length"):
        ours, theirs = first.values.get(key), other.values.get(key)
        if ours != theirs:
            raise KieloError(
                f"{other.path}: args.{key} = {theirs!r}, but {ours!r} in {first.path}: they are of two "
                "trainings. Fix: copy the iteration again"
            )
    if first.checkpoint_version != other.checkpoint_version:
        raise KieloError(
            f"{other.path}: checkpoint_version = {other.checkpoint_version}, but {first.checkpoint_version} "
            f"in {first.path}: they are of two trainings. Fix: copy the iteration again"
        )


def _refuse_other_names(paths: Sequence[Path], tables: Sequence[Mapping[str, Any]]) -> None:
    for path, table in zip(paths, tables, strict=True):
        if other := sorted(table.keys() ^ tables[0].keys()):
            raise KieloError(f"{path}: has other tensors than {paths[0]}: {some_names(other)}")


def _add(shards: Shards, tables: Sequence[Mapping[str, SplitTensor]], layers: int) -> int:
    """Add a stage's tensors, by rank, after `layers` earlier layers. Return its number of layers."""
    own = set[int]()
    for name in tables[0]:
        ours = _our_name(name)
        if ours is None:
            continue
        if (inside := _LAYER.fullmatch(ours)) is not None:
            own.add(int(inside[1]))
            ours = f"layers.{layers + int(inside[1])}.{inside[2]}"
        elif ours in shards:
            continue  # the last stage's copy of a tied matrix
        shards[ours] = [table[name] for table in tables]
    return len(own)


def _our_name(name: str) -> str | None:
    """Return our name of a tensor, "?NAME" if it is not known, None if it is no weight."""
    if _IGNORED.search(name):
        return None
    bare = re.sub(r"^(module\.)+", "", name)
    inside = _STACK.sub("", bare)
    if (found := _LAYER.fullmatch(inside)) is not None:
        ours = _name_in_layer(found[2])
        return f"layers.{found[1]}.{ours}" if ours else f"?{name}"
    module, _, kind = inside.removeprefix("language_model.").rpartition(".")
    ours = _ENDS.get(module)
    return f"{ours}.{kind}" if ours and kind in ("weight", "bias") else f"?{name}"


def _name_in_layer(name: str) -> str | None:
    name = re.sub(r"\.(fc\d)_(weight|bias)$", r".\1.\2", name)
    module, _, kind = name.rpartition(".")
    if (norm := re.fullmatch("layer_norm_(weight|bias)", kind)) is not None:
        fused = _FUSED_NORMS.get(_MODULES.get(module, module))
        return f"{fused}.{norm[1]}" if fused else None
    ours = _MODULES.get(module)
    return f"{ours}.{kind}" if ours and kind in ("weight", "bias") else None


def _of_layers(files: Mapping[tuple[int, int], Path]) -> Shards:
    """Join the files of layers. Their numbers also count DeepSpeed's functions without weights."""
    shards, layers = Shards(), 0
    ranks = 1 + max(rank for rank, _ in files)
    for number in sorted({number for _, number in files}):
        paths = [files[rank, number] for rank in range(ranks)]
        archives = [megatron_folder.read_file(path) for path in paths]
        tables = [tensors_of(archive, archive.content) for archive in archives]
        _refuse_other_names(paths, tables)
        layers += _add(shards, [_in_a_model(table) for table in tables], layers)
    return shards


def _in_a_model(table: Mapping[str, SplitTensor]) -> dict[str, SplitTensor]:
    """Give the tensors of one layer of DeepSpeed's pipeline their names in a model."""
    prefix = ""
    if table.keys() <= {"weight", "bias"}:
        prefix = "final_layernorm."
    elif any(_name_in_layer(name) for name in table):
        prefix = "encoder.layers.0."
    return {f"{prefix}{name}": tensor for name, tensor in table.items()}


def _of_universal(files: Mapping[str, Path], arguments: Arguments) -> Shards:
    """Take the whole tensors of a universal checkpoint. A pipeline's names begin with the number of a layer.

    The halves of a gated MLP lie in a row for each old tensor rank, unless the file says that it has two.
    """
    by_layer, in_two_parts = dict[int, dict[str, SplitTensor]](), set[Path]()
    for name, path in files.items():
        archive = megatron_folder.read_file(path)
        tensor = tensors_of(archive, archive.content).get("param")
        if tensor is None:
            raise KieloError(f"{path}: has no tensor `param`, so ds_to_universal.py did not write it")
        if archive.content.get("param_n_sub_params") == 2:
            in_two_parts.add(path)
        found = re.fullmatch(r"(?:(\d+)\.)?(.+)", name.removeprefix("tied_modules.embed."))
        number, inside = found.groups() if found else (None, name)
        by_layer.setdefault(-1 if number is None else int(number), {})[inside] = tensor
    shards, layers = Shards(), 0
    for number in sorted(by_layer):
        layers += _add(shards, [_in_a_model(by_layer[number])], layers)
    ranks = arguments.degrees.get("tensor", 1)
    for name, (tensor,) in shards.items():
        if ".fc1." in name and arguments.values.get("swiglu") and tensor.path not in in_two_parts:
            each = tensor.shape[0] // ranks
            shards[name] = [tensor.rows(rank * each, (rank + 1) * each) for rank in range(ranks)]
    return shards


def _of_distributed(folder: Path) -> Shards:
    """Take the whole tensors of torch_dist. Equal layers are stacked in one tensor, without their number."""
    shards = Shards()
    for name, tensor in megatron_distributed.read_tensors(folder, _is_weight).items():
        ours = _our_name(name)
        if ours is not None and ours.startswith("?"):  # perhaps of stacked layers
            stacked = _our_name(re.sub(r"(^|\.)layers\.(?!\d)", r"\1layers.0.", name))
            if stacked is not None and not stacked.startswith("?"):
                for number in range(tensor.shape[0]):
                    shards[stacked.replace("layers.0.", f"layers.{number}.", 1)] = [tensor.index(number)]
                continue
        if ours is not None:
            shards[ours] = [tensor]
    return shards


def _is_weight(name: str) -> bool:
    return not re.match(r"(chained_\d+\.)?optimizer|rng_state|rerun_state", name) and not _IGNORED.search(
        name
    )


def _refuse_incomplete(folder: Path, shards: Shards, model: CompleteModel) -> None:
    if unknown := sorted(name[1:] for name in shards if name.startswith("?")):
        raise KieloError(
            f"{folder}: tensors that a {model.model_type} does not have: {some_names(unknown)}. The model "
            "has parts that Kielo does not know"
        )
    layers = {int(found[1]) for name in shards if (found := _LAYER.fullmatch(name)) is not None}
    if len(layers) != model.num_hidden_layers:
        raise KieloError(
            f"{folder}: has {len(layers)} layers, and its arguments say {model.num_hidden_layers}: a "
            "pipeline rank is missing, or its files are of two trainings. Fix: copy the iteration again"
        )
    if "embed.weight" not in shards:
        raise KieloError(f"{folder}: has no embedding, so the first pipeline rank's files are missing")


def _tell_of_differences(folder: Path, shards: Shards) -> None:
    """Warn if vectors that all tensor ranks should have alike differ between their files."""
    different = list[str]()
    for name, ranks in shards.items():
        module = re.sub(r"^layers\.\d+\.", "", name).rpartition(".")[0]
        is_split = module in _SPLIT_ROWS or (module in _SPLIT_COLUMNS and name.endswith("weight"))
        if len(ranks) == 1 or is_split or len(ranks[0].shape) != 1:
            continue
        values = [torch.empty(one.shape) for one in ranks]
        boxes = (whole_box(one.shape) for one in ranks)
        read_parts(
            wanted
            for one, box, value in zip(ranks, boxes, values, strict=True)
            for wanted in one.wanted(box, value)
        )
        if not all(torch.equal(values[0], one) for one in values[1:]):
            different.append(name)
    if different:
        logger.warning(
            "%s: %d vectors differ between tensor ranks, such as %s: a known fault of some older versions. "
            "The first rank's are taken",
            folder,
            len(different),
            different[0],
        )


@dataclass(frozen=True)
class _Heads:
    """The rows of queries, keys and values of one tensor rank, by head, in order."""

    q: list[SplitTensor]
    k: list[SplitTensor]
    v: list[SplitTensor]


def _parameters(shards: Shards, model: CompleteModel, version: float) -> Iterator[tuple[str, SplitTensor]]:
    """Yield our parameters with their names."""
    is_gated = families.module(model.model_type, "tables").layer_parts(model).mlp_matrices == 3
    for name, ranks in shards.items():
        prefix, kind = name.rpartition(".")[0], name.rpartition(".")[2]
        module = re.sub(r"^layers\.\d+\.", "", prefix)
        layer = prefix.removesuffix(module)
        if module == "qkv":
            heads = [_heads(one, model, len(ranks), version) for one in ranks]
            for part in "qkv":
                yield (
                    f"{layer}attention.{part}.{kind}",
                    joined([x for one in heads for x in getattr(one, part)], 0),
                )
        elif module == "fc1" and is_gated:
            halves = [one.shape[0] // 2 for one in ranks]
            first = [one.rows(0, half) for one, half in zip(ranks, halves, strict=True)]
            second = [one.rows(half, 2 * half) for one, half in zip(ranks, halves, strict=True)]
            yield f"{layer}mlp.gate.{kind}", joined(first, 0)
            yield f"{layer}mlp.up.{kind}", joined(second, 0)
        elif module == "fc1":
            yield f"{layer}mlp.up.{kind}", joined(ranks, 0)
        elif module in _SPLIT_ROWS:
            yield name, joined(ranks, 0)
        elif module in _SPLIT_COLUMNS and kind == "weight":
            yield name, joined(ranks, 1)
        else:
            yield name, ranks[0]


def _heads(fused: SplitTensor, model: CompleteModel, ranks: int, version: float) -> _Heads:
    """Cut the fused rows of a rank. From version 2 on each group of keys follows its queries."""
    width, each = model.head_dim, model.num_attention_heads // model.num_key_value_heads
    groups = model.num_key_value_heads // ranks
    rows = groups * (each + 2) * width
    if model.num_key_value_heads % ranks or fused.shape[0] != rows:
        raise KieloError(
            f"{fused.path}: queries, keys and values have {fused.shape[0]} rows, and should have {rows}: "
            f"{groups} groups of {each} queries with heads of {width} numbers"
        )
    if version >= 2 or each > 1:
        block = (each + 2) * width
        starts = [number * block for number in range(groups)]
        queries = [fused.rows(start, start + each * width) for start in starts]
        keys = [fused.rows(start + each * width, start + (each + 1) * width) for start in starts]
        return _Heads(queries, keys, [fused.rows(start + block - width, start + block) for start in starts])
    if version < 1:
        size = groups * width
        return _Heads(*([fused.rows(number * size, (number + 1) * size)] for number in range(3)))
    return _Heads(*([fused.every(3, number)] for number in range(3)))


def _under_their_names(
    folder: Path, parameters: Mapping[str, SplitTensor], model: CompleteModel
) -> dict[str, SplitTensor]:
    """Join our parameters to the tensors of Hugging Face's files."""
    pieces = families.module(model.model_type, "tables").to_hugging_face(model)
    extra = sorted(parameters.keys() - pieces.keys() - {"head.weight"})
    if extra or not pieces.keys() <= parameters.keys():
        missing = sorted(pieces.keys() - parameters.keys())
        what = f"lacks {some_names(missing)}" if missing else f"has {some_names(extra)} too"
        raise KieloError(f"{folder}: its arguments make it a {model.model_type}, but it {what}")
    tables = dict[str, SplitTensor]()
    for name, group in by_stored_name(pieces).items():
        parts, dtype = list[FilePart](), parameters[next(iter(group))].dtype
        for ours, piece in group.items():
            value = parameters[ours]
            if piece.rows is not None and value.shape[0] < piece.rows:
                raise KieloError(
                    f"{folder}: {ours} has {value.shape[0]} rows, and the vocabulary {piece.rows} tokens: "
                    "the files are of another vocabulary than the arguments"
                )
            for box, place in piece.boxes(whole_box(value.shape)):
                part = value.box(box)
                first = [side.start for side in place]
                for one in (part.mT if piece.transposed else part).parts:
                    moved = tuple(map(sum, zip(first, one.first, strict=True)))
                    parts.append(replace(one, first=moved))
        shape = stored_shape(group, {ours: parameters[ours].shape for ours in group})
        tables[name] = assembled(dtype, shape, parts)
    return tables
