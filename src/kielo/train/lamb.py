"""LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2): Adam whose step has the length of what it changes.

A parameter p goes by -lr × ratio × u, with u = m / (√v + ε) + λ p, both moments corrected for their start,
and ratio = ‖p‖ / ‖u‖ over the whole parameter (the paper's φ is the identity). The ratio is 1 where either
norm is 0, and for all of a group without one: biases and norms, whose values say nothing about how far they
should go. They take Adam's steps, as in the training of LTG-BERT (Samuel et al. 2023, arXiv:2303.09859).

Each rank updates its own elements. Norms are summed over the ranks that hold the other parts, so a step is
the same in every layout but for the order of a sum.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kielo.parallel.materialise import local
from kielo.parallel.sum_over_parts import sum_over_parts


class Lamb(torch.optim.Optimizer):
    """LAMB with moments of any width; the caller puts "step", "exp_avg" and "exp_avg_sq" into its state.

    groups: with "params", "weight_decay" and "has_trust_ratio". found_inf: as of torch's fused optimisers, a
    float32 scalar on the parameters' device; where it is 1 a step changes nothing, bit for bit. Moments that
    are narrower than fp32 are rounded before the update is made of them.
    """

    found_inf: Tensor | None = None

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        taken = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, group in taken:
            self._update_moments(parameter, group)
        ratios = self._trust_ratios([(p, group) for p, group in taken if group["has_trust_ratio"]])
        for parameter, group in taken:
            factor = -group["lr"] * ratios.get(parameter, 1.0)
            # Made a second time, so that no more than one parameter's is in memory.
            values = local(parameter)
            self._write(values, self._update(parameter, group).mul_(factor).add_(values))

    def _update_moments(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, gradient, (beta1, beta2) = self.state[parameter], local(parameter.grad), group["betas"]
        state["step"] += 1 if self.found_inf is None else 1 - self.found_inf
        mean, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
        self._write(mean, torch.lerp(mean.float(), gradient, 1 - beta1))
        self._write(square, (square.float() * beta2).addcmul_(gradient, gradient, value=1 - beta2))

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Returns this rank's part of u, fp32."""
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        root = local(state["exp_avg_sq"]).to(torch.float32, copy=True)
        root.div_(_missing(beta2, state["step"])).sqrt_().add_(group["eps"])
        update = local(state["exp_avg"]).to(torch.float32, copy=True)
        update.div_(_missing(beta1, state["step"])).div_(root)
        return update.add_(local(parameter), alpha=group["weight_decay"])

    def _trust_ratios(self, taken: list[tuple[nn.Parameter, dict[str, Any]]]) -> dict[nn.Parameter, Tensor]:
        """Returns parameter → ‖p‖ / ‖u‖ of the whole parameter, an fp32 scalar on its device."""
        squares = []
        for parameter, group in taken:
            both = local(parameter), self._update(parameter, group)
            squares.append(torch.stack([torch.linalg.vector_norm(one) for one in both]).square())
        ratios = {}
        parameters = [parameter for parameter, _ in taken]
        for parameter, whole in zip(parameters, sum_over_parts(squares, parameters)):
            of_values, of_update = whole.sqrt()
            has_length = (of_values > 0) & (of_update > 0)
            ratios[parameter] = torch.where(has_length, of_values / of_update, 1.0)
        return ratios

    def _write(self, old: Tensor, new: Tensor) -> None:
        """Writes `new` into `old` unless the step is left out."""
        if self.found_inf is None:
            old.copy_(new)
        else:
            torch.where(self.found_inf.bool(), old, new.to(old.dtype), out=old)


def _missing(beta: float, steps: Tensor) -> Tensor:
    """Computes 1 - beta^steps, what a moment's weights add up to after so many steps, without cancelling."""
    return -torch.expm1(steps * math.log(beta))
