"""The optimisers of `recipe/optimisers.py`, over sharded parameters, with steps that a flag on the device can
undo.

If the flag is set, parameters and moments stay the same bit for bit.
"""

import importlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_step
from torch.profiler import record_function

from kielo.parallel.gradient_clipping import sum_over_parts
from kielo.parallel.materialise import local
from kielo.recipe.optimisers import OPTIMISERS, WIDENED_BYTES
from kielo.recipe.sections import TrainIdentity
from kielo.train.profile import OPTIMISER

MOMENTS = OPTIMISERS["adamw"].moments
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIDENED_ELEMENTS = WIDENED_BYTES // (len(MOMENTS) * torch.float32.itemsize)

Group = dict[str, Any]  # as torch's optimisers take it: "params", "weight_decay" and more


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2), Adam with steps as long as the parameter.

    A parameter p moves by -lr × ratio × u, with u = m / (√v + ε) + λ p, both moments corrected for their
    start, and ratio = ‖p‖ / ‖u‖ over the whole parameter (the paper's φ is the identity). The ratio is 1 if
    either norm is 0, and for biases and norms, which take Adam's steps as in LTG-BERT (Samuel et al. 2023,
    arXiv:2303.09859). Each rank updates its own elements. Norms are summed over the ranks, so a step is the
    same in every layout except for the order of a sum.

    The caller puts "step", "exp_avg" and "exp_avg_sq" of any width into the state. Moments narrower than fp32
    are rounded before the update is made of them. `found_inf` is a float32 scalar on the parameters' device,
    as in torch's fused optimisers. If it is 1, a step changes nothing.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: Iterable[Group], train: TrainIdentity) -> None:
        with_ratios = [group | {"has_trust_ratio": any(map(is_decayed, group["params"]))} for group in groups]
        super().__init__(with_ratios, _settings(train))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever given
        taken = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, group in taken:
            self._update_moments(parameter, group)
        ratios = self._trust_ratios([(p, group) for p, group in taken if group["has_trust_ratio"]])
        for parameter, group in taken:
            factor = -group["lr"] * ratios.get(parameter, 1.0)
            values = local(parameter)
            # computed a second time, so that memory has the update of a single parameter
            self._write(values, self._update(parameter, group).mul_(factor).add_(values))

    def _update_moments(self, parameter: nn.Parameter, group: Group) -> None:
        state, gradient, (beta1, beta2) = self.state[parameter], _gradient(parameter), group["betas"]
        state["step"] += 1 if self.found_inf is None else 1 - self.found_inf
        mean, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
        self._write(mean, torch.lerp(mean.float(), gradient, 1 - beta1))
        self._write(square, (square.float() * beta2).addcmul_(gradient, gradient, value=1 - beta2))

    def _update(self, parameter: nn.Parameter, group: Group) -> Tensor:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        root = local(state["exp_avg_sq"]).to(torch.float32, copy=True)
        root.div_(_missing(beta2, state["step"])).sqrt_().add_(group["eps"])
        update = local(state["exp_avg"]).to(torch.float32, copy=True)
        update.div_(_missing(beta1, state["step"])).div_(root)
        return update.add_(local(parameter), alpha=group["weight_decay"])

    def _trust_ratios(self, taken: list[tuple[nn.Parameter, Group]]) -> dict[nn.Parameter, Tensor]:
        """Return parameter → ‖p‖ / ‖u‖ of the whole parameter, an fp32 scalar on its device."""
        squares = []
        for parameter, group in taken:
            both = local(parameter), self._update(parameter, group)
            squares.append(torch.stack([torch.linalg.vector_norm(one) for one in both]).square())
        ratios, parameters = {}, [parameter for parameter, _ in taken]
        for parameter, whole in zip(parameters, sum_over_parts(squares, parameters), strict=True):
            of_values, of_update = whole.sqrt()
            has_length = (of_values > 0) & (of_update > 0)
            ratios[parameter] = torch.where(has_length, of_values / of_update, 1.0)
        return ratios

    def _write(self, old: Tensor, new: Tensor) -> None:
        if self.found_inf is None:
            old.copy_(new)
        else:
            torch.where(self.found_inf.bool(), old, new.to(old.dtype), out=old)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise ValueError("a parameter without a gradient has no step")
    return local(parameter.grad)


def _missing(beta: float, steps: Tensor) -> Tensor:
    """Compute 1 - beta^steps, the sum of a moment's weights after `steps` steps, without cancelling."""
    return -torch.expm1(steps * math.log(beta))


class Optimiser:
    """The recipe's optimiser. `algorithm` makes the updates.

    Its state exists before the first step, to restore a checkpoint in place and to need no more memory later.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], train: TrainIdentity):
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self._begun: Mapping[str, int] = {}
        self.moment_names = OPTIMISERS[train.optimiser].moments
        parameters = self.parameters.values()
        groups: list[Group] = [
            {"params": [p for p in parameters if is_decayed(p)], "weight_decay": train.weight_decay},
            {"params": [p for p in parameters if not is_decayed(p)], "weight_decay": 0.0},
        ]
        # A stage can train nothing. torch refuses an empty list of groups, but takes an empty group.
        groups = [group for group in groups if group["params"]] or groups
        module, _, name = OPTIMISERS[train.optimiser].made_by.partition(":")
        self.algorithm: torch.optim.Optimizer = getattr(importlib.import_module(module), name)(groups, train)
        for parameter in self.parameters.values():
            state = self.algorithm.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment in self.moment_names:
                state[moment] = torch.zeros_like(parameter, dtype=STATE_DTYPES[train.optimiser_state])

    def step(self, lr: float, skip: Tensor | None = None) -> None:
        """Make one update at learning rate `lr`, or change nothing if `skip`, a float32 scalar, is 1.

        The optimisers read the flag on the device, so the host need not wait. A skipped step does not count
        for bias correction.
        """
        for group in self.algorithm.param_groups:
            group["lr"] = lr
        if skip is not None and self.parameters:
            skip = skip.to(next(iter(self.parameters.values())).device)  # offloaded parameters are on the CPU
        self.algorithm.found_inf = skip  # type: ignore[attr-defined]  # torch reads it, its class lacks it
        with record_function(OPTIMISER):
            self.algorithm.step()

    def zero_grad(self) -> None:
        self.algorithm.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, Tensor]:
        """Return the moments, without copies, by names such as "<parameter>/exp_avg"."""
        return {
            f"{name}/{moment}": self.algorithm.state[parameter][moment]
            for name, parameter in self.parameters.items()
            for moment in self.moment_names
        }

    @property
    def updates(self) -> int:
        """The updates of the run, without skipped steps. Waits for the device."""
        steps = {name: self.algorithm.state[parameter]["step"] for name, parameter in self.parameters.items()}
        return max((int(step.item()) + self._begun.get(name, 0) for name, step in steps.items()), default=0)

    def resume(self, updates: int, begun: Mapping[str, int]) -> None:
        """Set the updates made so far. Waits for the device.

        begun: parameter → the run's updates before its first update, default 0. Its moments and bias
        correction begin there.
        """
        self._begun = begun
        for name, parameter in self.parameters.items():
            self.algorithm.state[parameter]["step"].fill_(updates - begun.get(name, 0))


def _settings(train: TrainIdentity) -> Group:
    return {"lr": 0.0, "betas": (train.adam_beta1, train.adam_beta2), "eps": train.adam_epsilon}


def adamw(groups: Iterable[Group], train: TrainIdentity) -> torch.optim.AdamW:
    """Make torch's fused AdamW (Loshchilov and Hutter 2019)."""
    kind = torch.optim.AdamW if train.optimiser_state == "fp32" else NarrowAdamW
    return kind(groups, **_settings(train), fused=True)


class NarrowAdamW(torch.optim.AdamW):
    """AdamW with moments in bf16, as DeepSeek-V3 was trained (arXiv:2412.19437, section 3.3.1).

    That saves 4 bytes a parameter. torch's fused kernel takes only moments as wide as the parameters, so a
    step widens a bounded number of elements to fp32, runs the kernel, and rounds to nearest. A skipped step
    gives the same bits. The caller puts the moments into the state.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever given
        for group in self.param_groups:
            for bucket in _buckets([p for p in group["params"] if p.grad is not None], WIDENED_ELEMENTS):
                states = [self.state[slice_.parameter] for slice_ in bucket]
                pairs = list(zip(bucket, states, strict=True))
                narrow = [slice_.of(state[moment]) for moment in MOMENTS for slice_, state in pairs]
                wide = [torch.empty_like(moment, dtype=torch.float32) for moment in narrow]
                torch._foreach_copy_(wide, narrow)
                adamw_step(
                    [slice_.of(slice_.parameter) for slice_ in bucket],
                    [slice_.of(_gradient(slice_.parameter)) for slice_ in bucket],
                    wide[: len(bucket)],
                    wide[len(bucket) :],
                    [],
                    # an update of a parameter in several slices counts once, with the last slice
                    [state["step"] if slice_.is_last else state["step"].clone() for slice_, state in pairs],
                    fused=True,
                    found_inf=self.found_inf,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                torch._foreach_copy_(narrow, wide)


@dataclass(frozen=True)
class _Slice:
    parameter: nn.Parameter
    first: int
    last: int
    is_last: bool

    def of(self, tensor: Tensor) -> Tensor:
        return local(tensor).view(-1)[self.first : self.last]


def _buckets(parameters: Iterable[nn.Parameter], limit: int) -> Iterator[list[_Slice]]:
    """Yield all elements on this rank in buckets of at most `limit`, with one slice of a parameter each."""
    bucket: list[_Slice] = []
    room = limit
    for parameter in parameters:
        size, first = local(parameter).numel(), 0
        while True:
            last = min(first + room, size)
            bucket.append(_Slice(parameter, first, last, last == size))
            room -= last - first
            if room == 0:
                yield bucket
                bucket, room = [], limit
            if last == size:
                break
            first = last
    if bucket:
        yield bucket


def is_decayed(parameter: Tensor) -> bool:
    """Return True for matrices and the embedding. Norm weights and biases have no weight decay."""
    return parameter.ndim >= 2
