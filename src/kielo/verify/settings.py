"""Effective settings of a training run, read off live objects under names that both sides share.

Data in: an optimiser, RoPE tables, parameters; data out: plain values under setting names, and which of two
differ.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

SETTING_TOLERANCE = 1e-5  # RoPE frequencies are read off fp32 tables; other settings are exact


def optimiser_settings(optimiser: torch.optim.AdamW, named: dict[str, torch.nn.Parameter]) -> dict[str, Any]:
    """Reads settings off an optimiser. named: our parameter name → the parameter that it holds."""
    group_of = {id(parameter): group for group in optimiser.param_groups for parameter in group["params"]}
    groups = {name: group_of[id(parameter)] for name, parameter in named.items() if id(parameter) in group_of}
    moments = [
        optimiser.state[parameter]["exp_avg"] for parameter in named.values() if parameter in optimiser.state
    ]
    return {
        "optimiser": type(optimiser).__name__ + (", amsgrad" if optimiser.defaults["amsgrad"] else ""),
        "Adam betas": sorted({tuple(float(beta) for beta in group["betas"]) for group in groups.values()}),
        "Adam epsilon": sorted({group["eps"] for group in groups.values()}),
        "weight decay": {name: group["weight_decay"] for name, group in groups.items()},
        "parameters not trained": sorted(set(named) - set(groups)),
        "precision of optimiser state": dtype_names(moments),
    }


def rope_settings(tables: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Reads settings off the (cosines, sines) of all layers, or of full layers and then windowed ones.

    Returns none without RoPE.
    """
    settings: dict[str, Any] = {}
    for (cos, sin), which in zip(tables, ("", " of windowed layers")):
        frequencies = frequencies_at_position_1(cos, sin)
        settings[f"RoPE base{which}"] = base_of(frequencies)
        settings[f"RoPE inverse frequencies{which}"] = frequencies
    return settings


def frequencies_at_position_1(cos: Tensor, sin: Tensor) -> list[float]:
    """Radians per position of each pair: position 1's angles in the tables in use ([≥ 2, head_dim / 2])."""
    return torch.atan2(sin[1].double(), cos[1].double()).abs().tolist()


def base_of(frequencies: list[float]) -> float | None:
    """RoPE's base, from its two fastest pairs, whose ratio scaling leaves unchanged."""
    if len(frequencies) < 2 or not frequencies[1]:
        return None
    return (frequencies[0] / frequencies[1]) ** len(frequencies)


def dtype_names(tensors: Iterable[Tensor]) -> list[str]:
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})


def differing(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Returns the names of the settings that differ, in the order of `ours`."""
    return [name for name in ours if not _same(ours[name], theirs.get(name))]


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        return math.isclose(ours, theirs, rel_tol=SETTING_TOLERANCE)
    return ours == theirs
