"""AdamW over the sharded parameters of a model, with a step that a flag on the device can undo.

In: gradients on the parameters, the learning rate of the step, optionally a flag. Out: parameters and moments moved,
or, where the flag is set, left bit for bit as they were. The moments have names ("<parameter>/exp_avg"), so that a
checkpoint knows no order of parameters and no layout.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


class OptimiserSettings(Protocol):
    """What the optimiser reads; `plan.resolved.Identity` has all of it."""

    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float


class Optimiser:
    """torch's fused AdamW (Loshchilov and Hutter 2019), its state made at once instead of at the first step.

    The state must exist before the first step for a checkpoint to be restored into it in place, and so that the
    first step needs no more memory than the others.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimiserSettings):
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        groups = [
            {"params": [p for p in self.parameters.values() if is_decayed(p)], "weight_decay": settings.weight_decay},
            {"params": [p for p in self.parameters.values() if not is_decayed(p)], "weight_decay": 0.0},
        ]
        # Stages may train nothing, and torch refuses an empty list, though not an empty group.
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]] or groups,
            lr=0.0,  # each step brings its own
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            fused=True,
        )
        for parameter in self.parameters.values():
            state = self.adamw.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state.update({moment: torch.zeros_like(parameter) for moment in MOMENTS})

    def step(self, lr: float, skip: Tensor | None = None) -> None:
        """One update at learning rate `lr`. `skip`: a float32 scalar on the device, 1 leaves all as it was.

        torch's fused kernels read the flag on the device (it is what gradient scalers use), also for DTensors and on
        the CPU, so that the host need not wait to learn whether the step was sound. A skipped step does not count in
        the bias correction either.
        """
        for group in self.adamw.param_groups:
            group["lr"] = lr
        if skip is not None and self.parameters:
            skip = skip.to(next(iter(self.parameters.values())).device)  # offloaded parameters are on the CPU
        self.adamw.found_inf = skip
        self.adamw.step()

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, Tensor]:
        """The moments themselves, no copies: "<parameter>/exp_avg", "<parameter>/exp_avg_sq"."""
        return {
            f"{name}/{moment}": self.adamw.state[parameter][moment]
            for name, parameter in self.parameters.items()
            for moment in MOMENTS
        }

    @property
    def updates(self) -> int:
        """Updates made, skipped steps not counted. Waits for the device."""
        return max((int(state["step"].item()) for state in self.adamw.state.values()), default=0)

    @updates.setter
    def updates(self, updates: int) -> None:
        for state in self.adamw.state.values():
            state["step"].fill_(updates)


def is_decayed(parameter: Tensor) -> bool:
    """Weight decay is for matrices, the embedding among them; norm weights and biases have none."""
    return parameter.ndim >= 2


def build_optimiser(model: nn.Module, settings: OptimiserSettings) -> Optimiser:
    """An optimiser for the trainable parameters of `model`; a tied weight counts once, under its first name."""
    return Optimiser(model.named_parameters(), settings)
