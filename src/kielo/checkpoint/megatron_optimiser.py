"""Adam's state in a Megatron checkpoint, under the names of the weights that it belongs to.

A rank's file of the legacy format numbers the parameters: matrices first and vectors after them, or the other
way round, because biases and norms have no weight decay. Inside of both the order is the model's. In mixed
precision the file has the fp32 weights too, which must round to the model's weights.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from kielo.artifact import megatron_folder
from kielo.artifact.torch_archive import TorchArchive
from kielo.checkpoint.split_tensor import SplitTensor, read_parts
from kielo.checkpoint.tensor_table import DTYPES
from kielo.checkpoint.torch_tensors import tensor_of
from kielo.recipe.errors import KieloError

AdamState = Literal["fp32", "exp_avg", "exp_avg_sq"]
# Ends of the names of tensors that are no parameters.
_NO_PARAMETERS = ("_extra_state", "inv_freq", "masked_bias")
_ADVICE = "Fix: train.optimiser_from_weights = false, which starts the moments at 0"


class AdamFacts(NamedTuple):
    """The updates made so far, and (beta1, beta2, epsilon) of the training, None if its files lack them."""

    updates: int
    settings: tuple[float, float, float] | None


def adam_facts(folder: Path) -> AdamFacts:
    """Read the updates and settings of Adam. KieloError if the state is not whole, or ranks differ."""
    if (obstacle := megatron_folder.optimiser_obstacle(folder)) is not None:
        raise KieloError(f"{folder}: the optimiser cannot be taken over: {obstacle}. {_ADVICE}")
    if megatron_folder.format_of(folder) == "universal":
        return _universal_facts(folder)
    found = dict[AdamFacts, Path]()
    for path in megatron_folder.rank_files(folder).values():
        archive = megatron_folder.read_file(path)
        inner = _inner(archive)
        counts = {_number(archive, one.get("step")) for one in inner["state"].values()} - {None}
        counts |= {_number(archive, one.get("step")) for one in inner["param_groups"]} - {None}
        found.setdefault(AdamFacts(_one_count(path, counts), _settings(inner["param_groups"])), path)
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise KieloError(f"{second}: Adam has {other}, but {one} in {first}. Fix: copy the iteration again")
    return next(iter(found))


def _universal_facts(folder: Path) -> AdamFacts:
    common = folder / "zero" / "optimizer_state.pt"
    content = megatron_folder.read_file(common).content if common.is_file() else {}
    groups = content.get("param_groups") if isinstance(content, dict) else None
    groups = [one for one in groups or () if isinstance(one, dict)]
    counts = {one.get("step") for one in groups} - {None}
    for path in sorted(folder.glob("zero/*/step.pt")):
        archive = megatron_folder.read_file(path)
        counts.add(_number(archive, archive.content))
    return AdamFacts(_one_count(folder / "zero", counts), _settings(groups))


def _settings(groups: Sequence[Any]) -> tuple[float, float, float] | None:
    for one in groups:
        if isinstance(one, dict) and isinstance(one.get("betas"), (tuple, list)) and "eps" in one:
            first, second = one["betas"]
            return float(first), float(second), float(one["eps"])
    return None


def _one_count(path: Path, counts: set[Any]) -> int:
    (count,) = counts if len(counts) == 1 else (None,)
    if count is None or count != int(count) or count < 1:
        said = sorted(map(str, counts)) or "none"
        raise KieloError(f"{path}: the updates of Adam (step) must be one number, and are {said}. {_ADVICE}")
    return int(count)


def _number(archive: TorchArchive, value: Any) -> float | None:
    if value is None or isinstance(value, (int, float)):
        return value
    tensor = tensor_of(archive, value, "step")
    if tensor is None or math.prod(tensor.shape) != 1:
        raise KieloError(f"{archive.path}: damaged: step is no number")
    read = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
    read_parts(tensor.wanted([slice(0, 1)] * len(tensor.shape), read))
    return read.item()


def moved_to_optimiser(
    archive: TorchArchive, chunks: Sequence[dict[str, SplitTensor]], state: AdamState
) -> list[dict[str, SplitTensor]]:
    """Replace each weight of a rank's virtual stages by `state` of the optimiser.

    Raise KieloError if the optimiser's parameters are not the model's, in number, shapes or rounded values.
    """
    inner, masters = _inner(archive), _masters(archive)
    weights = [
        (tensor, (number, name))
        for number, tensors in enumerate(chunks)
        for name, tensor in tensors.items()
        if not name.endswith(_NO_PARAMETERS)
    ]
    moved = [dict(tensors) for tensors in chunks]
    for (number, name), index in _paired(archive, inner, weights):
        weight, master = chunks[number][name], masters.get(index)
        if state == "fp32":
            tensor = master or weight
        else:
            found = tensor_of(archive, inner["state"].get(index, {}).get(state), f"{state} of {name}")
            if found is None:
                raise KieloError(f"{archive.path}: the optimiser has no {state} of {name}. {_ADVICE}")
            tensor = found
        if tensor.shape != weight.shape or (master is not None and not _rounds_to(master, weight)):
            raise KieloError(
                f"{archive.path}: parameter {index} of the optimiser is not {name}: its shape or its rounded "
                f"values differ. {_ADVICE}"
            )
        moved[number][name] = tensor
    return moved


def _paired(
    archive: TorchArchive, inner: dict[str, Any], weights: Sequence[tuple[SplitTensor, tuple[int, str]]]
) -> Iterator[tuple[tuple[int, str], int]]:
    """Yield (the weight's chunk and name, its number in the optimiser)."""
    queues = {
        is_vector: [place for weight, place in weights if (len(weight.shape) == 1) == is_vector]
        for is_vector in (False, True)
    }
    everything = [place for _, place in weights]
    groups = inner["param_groups"]
    if sum(len(group["params"]) for group in groups) != len(everything) or len(groups) > 2:
        _refuse_groups(archive, groups, queues)
    for group in groups:
        names = everything
        if len(groups) == 2:
            first = tensor_of(archive, inner["state"].get(group["params"][0], {}).get("exp_avg"), "exp_avg")
            names = queues[first is not None and len(first.shape) == 1]
        if len(names) != len(group["params"]):
            _refuse_groups(archive, groups, queues)
        yield from zip(names, group["params"], strict=True)


def _refuse_groups(
    archive: TorchArchive, groups: Sequence[Any], queues: Mapping[bool, Sequence[Any]]
) -> None:
    raise KieloError(
        f"{archive.path}: the optimiser has {[len(group['params']) for group in groups]} parameters, and the "
        f"model {len(queues[False])} matrices and {len(queues[True])} vectors. {_ADVICE}"
    )


def _inner(archive: TorchArchive) -> dict[str, Any]:
    """Return torch's state_dict of Adam. In mixed precision it is inside of Megatron's own."""
    found = archive.content.get("optimizer")
    if isinstance(found, dict) and "param_groups" not in found:
        found = found.get("optimizer")
    state, groups = (found.get(key) if isinstance(found, dict) else None for key in ("state", "param_groups"))
    if not isinstance(state, dict) or not isinstance(groups, list):
        raise KieloError(f"{archive.path}: has no state and param_groups of Adam. {_ADVICE}")
    return {
        "state": {number: entry for number, entry in state.items() if isinstance(entry, dict)},
        "param_groups": [group for group in groups if isinstance(group, dict) and group.get("params")],
    }


def _masters(archive: TorchArchive) -> dict[int, SplitTensor]:
    """Return the fp32 weights by their numbers in the optimiser. A training in fp32 has none."""
    groups = archive.content["optimizer"].get("fp32_from_fp16_params")
    if groups is None:
        return {}
    found = dict[int, SplitTensor]()
    filled = [tensors for tensors in groups if tensors]
    for group, tensors in zip(_inner(archive)["param_groups"], filled, strict=False):
        if len(group["params"]) != len(tensors):
            raise KieloError(
                f"{archive.path}: {len(group['params'])} parameters have {len(tensors)} fp32 weights. "
                f"{_ADVICE}"
            )
        for index, value in zip(group["params"], tensors, strict=True):
            tensor = tensor_of(archive, value, f"the fp32 weight {index}")
            if tensor is not None:
                found[index] = tensor
    return found


def _rounds_to(master: SplitTensor, weight: SplitTensor) -> bool:
    """Compare the first row, because a wrong order cannot give the same numbers."""
    if master.shape != weight.shape:
        return False
    box = [slice(0, 1), *(slice(0, size) for size in weight.shape[1:])]
    if len(weight.shape) == 1:
        box = [slice(0, weight.shape[0])]
    shape = [side.stop - side.start for side in box]
    ours, theirs = torch.empty(shape), torch.empty(shape, dtype=DTYPES[weight.dtype])
    read_parts([*master.wanted(box, ours), *weight.wanted(box, theirs)])
    return torch.equal(ours.to(theirs.dtype), theirs)
