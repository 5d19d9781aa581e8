"""Inputs and outputs of two models' modules, and the first place where they differ.

Data in: modules under common names, a forward pass; data out: for each module in the order of running, its
input and output; and the first place where two such traces differ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Trace:
    """`passed`: module name → (input, output), in the order of running."""

    passed: dict[str, tuple[Tensor, Tensor]]
    logits: Tensor


@dataclass(frozen=True)
class FirstDifference:
    """The first place where two traces differ. `where` describes it in a phrase."""

    layer: str
    where: str
    relative_difference: float


def trace_forward(modules: dict[str, nn.Module], forward: Callable[[], Tensor]) -> Trace:
    """Runs `forward` (which returns logits) with hooks on `modules`, removed at the end."""
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
    """Computes ‖ours − theirs‖ / ‖theirs‖; infinite where one is not finite or the sizes differ.

    Some models flatten tokens, so only the number of elements must agree. floor: the least norm of theirs.
    """
    if ours.numel() != theirs.numel():
        return float("inf")
    if ours.dim() == theirs.dim() == 4 and ours.shape != theirs.shape:  # a Gemma 3 norms heads before tokens
        theirs = theirs.transpose(1, 2)
    difference = (ours.float().flatten() - theirs.float().flatten()).norm()
    scale = theirs.float().norm()
    ratio = (difference / scale.clamp(min=max(floor, torch.finfo(torch.float32).tiny))).item()
    return ratio if ratio == ratio else float("inf")


def first_difference(ours: Trace, theirs: Trace, limit: float) -> FirstDifference | None:
    """Finds the first module, in our order of running, whose input or output differs by more than `limit`.

    The limit is relative. An input that differs, while everything before it agreed, puts the cause between
    modules: the parent (attention or MLP, say) is named then. An output that differs for an equal input is
    caused by that module itself.
    """
    before: list[str] = []
    for name, (our_input, our_output) in ours.passed.items():
        their_input, their_output = theirs.passed[name]
        if our_input.is_floating_point():
            difference = relative_difference(our_input, their_input)
            if difference > limit:
                siblings = [other.rpartition(".")[2] for other in before if _parent(other) == _parent(name)]
                after = f"after {', '.join(siblings)} and " if siblings else ""
                where = f"{after}before {name.rpartition('.')[2]}" if _parent(name) else f"before {name}"
                return FirstDifference(_parent(name) or name, where, difference)
        elif name == "embed" and not torch.equal(our_input, their_input):
            return FirstDifference(name, "the token ids themselves", float("inf"))
        difference = relative_difference(our_output, their_output)
        if difference > limit:
            return FirstDifference(name, "in it: its input is equal, its output is not", difference)
        before.append(name)
    return None


def largest_difference(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], floor: float = 0.0
) -> tuple[str, float]:
    """(name, relative difference) of the pair of tensors that differ most; `floor` as above."""
    differences = {name: relative_difference(tensor, theirs[name], floor) for name, tensor in ours.items()}
    name = max(differences, key=differences.__getitem__)
    return name, differences[name]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
