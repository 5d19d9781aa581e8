"""Traces of two models for a comparison: settings in force, and inputs and outputs of modules.

Settings are read off live objects, under names that both sides share.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kielo.artifact.verify_results import FirstDifference


def gradient_of(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise ValueError("a parameter has no gradient after the backward of a whole step")
    return parameter.grad


Values = dict[str, object]  # name of a setting → its value
SETTING_TOLERANCE = 1e-5  # RoPE frequencies are read off fp32 tables; other settings are exact


def optimiser_settings(optimiser: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> Values:
    """Read settings off an optimiser. named: our parameter name → the parameter that it holds."""
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


def rope_settings(tables: Iterable[tuple[Tensor, Tensor]]) -> Values:
    """Read settings off the (cosines, sines) of all layers, or of full and then windowed layers; {} without
    RoPE.
    """
    settings: Values = {}
    for (cos, sin), which in zip(tables, ("", " of windowed layers"), strict=False):
        frequencies = frequencies_at_position_1(cos, sin)
        settings[f"RoPE base{which}"] = base_of(frequencies)
        settings[f"RoPE inverse frequencies{which}"] = frequencies
    return settings


def frequencies_at_position_1(cos: Tensor, sin: Tensor) -> list[float]:
    """Return radians per position of each pair: the angles of position 1 [≥ 2, head_dim / 2]."""
    return torch.atan2(sin[1].double(), cos[1].double()).abs().tolist()


def base_of(frequencies: list[float]) -> float | None:
    """Return RoPE's base, from its two fastest pairs, whose ratio scaling leaves unchanged."""
    if len(frequencies) < 2 or not frequencies[1]:
        return None
    return (frequencies[0] / frequencies[1]) ** len(frequencies)


def dtype_names(tensors: Iterable[Tensor]) -> list[str]:
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})


def differing(ours: Values, theirs: Values) -> list[str]:
    return [name for name in ours if not _same(ours[name], theirs.get(name))]


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        return math.isclose(ours, theirs, rel_tol=SETTING_TOLERANCE)
    return ours == theirs


@dataclass
class Trace:
    """`passed`: module name → (input, output), in the order of running."""

    passed: dict[str, tuple[Tensor, Tensor]]
    logits: Tensor


def trace_forward(modules: dict[str, nn.Module], forward: Callable[[], Tensor]) -> Trace:
    """Run `forward`, which returns logits, with temporary hooks on `modules`."""
    passed: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            passed[name] = (arguments[0].detach(), output.detach())

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in modules.items()]
    try:
        logits = forward()
    finally:
        for handle in handles:
            handle.remove()
    return Trace(passed, logits.detach())


def relative_difference(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> float:
    """Return ‖ours − theirs‖ / ‖theirs‖; infinite if a value is not finite or the sizes differ.

    Some models flatten tokens, so only the number of elements must agree. floor: the least norm of theirs.
    """
    if ours.numel() != theirs.numel():
        return float("inf")
    if ours.dim() == theirs.dim() == 4 and ours.shape != theirs.shape:  # a Gemma 3 norms heads before tokens
        theirs = theirs.transpose(1, 2)
    difference = (ours.float().flatten() - theirs.float().flatten()).norm()
    scale = theirs.float().norm()
    ratio = (difference / scale.clamp(min=max(floor, torch.finfo(torch.float32).tiny))).item()
    return float("inf") if math.isnan(ratio) else ratio


def first_difference(ours: Trace, theirs: Trace, limit: float) -> FirstDifference | None:
    """Find the first module, in our order of running, whose input or output differs by more than `limit`.

    The limit is relative. An input that differs after equal outputs has its cause between modules, and the
    parent (attention or MLP, say) is named. An output that differs after an equal input is caused by that
    module.
    """

    def found(layer: str, where: str, difference: float) -> FirstDifference:
        return FirstDifference(layer=layer, where=where, relative_difference=difference)

    before: list[str] = []
    for name, (our_input, our_output) in ours.passed.items():
        their_input, their_output = theirs.passed[name]
        if our_input.is_floating_point():
            difference = relative_difference(our_input, their_input)
            if difference > limit:
                siblings = [other.rpartition(".")[2] for other in before if _parent(other) == _parent(name)]
                after = f"after {', '.join(siblings)} and " if siblings else ""
                where = f"{after}before {name.rpartition('.')[2]}" if _parent(name) else f"before {name}"
                return found(_parent(name) or name, where, difference)
        elif name == "embed" and not torch.equal(our_input, their_input):
            return found(name, "the token ids themselves", float("inf"))
        difference = relative_difference(our_output, their_output)
        if difference > limit:
            return found(name, "in it: its input is equal, its output is not", difference)
        before.append(name)
    return None


def largest_difference(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], floor: float = 0.0
) -> tuple[str, float]:
    """Return (name, relative difference) of the pair of tensors that differ most. `floor` as above."""
    differences = {name: relative_difference(tensor, theirs[name], floor) for name, tensor in ours.items()}
    name = max(differences, key=differences.__getitem__)
    return name, differences[name]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
