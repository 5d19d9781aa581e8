"""Precision of a run: deterministic kernels, float32 products, the precision of each step, a probe of FP8."""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch._inductor.config as inductor_config
from torch import nn

from kielo.artifact.metrics import Fp8GradientProbe
from kielo.parallel.fp8 import in_bf16
from kielo.parallel.gradient_clipping import gradient_norm
from kielo.parallel.mesh import Mesh
from kielo.recipe.sections import Precision
from kielo.resolve.resolved import Identity, filled
from kielo.train.feed import StepBatch
from kielo.train.forward_backward import ForwardBackward
from kielo.train.state import State

# Two workspaces of 4 MiB a stream: a value with which cuBLAS promises equal results (its manual, "Results
# reproducibility").
_CUBLAS_WORKSPACE = ":4096:8"


@contextmanager
def determinism(is_wanted: bool) -> Iterator[None]:
    """Make torch use deterministic kernels only (`train.deterministic`), before the first product on a GPU.

    Flash attention's backward then adds in a fixed order, cuDNN's attention is not used, and Inductor chooses
    kernels by rule, not by timing. An operator without a deterministic kernel raises RuntimeError.
    """
    if not is_wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE)
    changed = (
        (torch.utils.deterministic, "fill_uninitialized_memory", False),  # training reads none
        (torch.backends.cudnn, "deterministic", True),
        (torch.backends.cudnn, "benchmark", False),
        (inductor_config, "deterministic", True),
    )
    before = [getattr(owner, name) for owner, name, _ in changed]
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        for owner, name, value in changed:
            setattr(owner, name, value)
        torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
        for (owner, name, _), value in zip(changed, before, strict=True):
            setattr(owner, name, value)


def settle_matrix_products(precision: Precision) -> None:
    """Set whether float32 products may use TensorFloat-32: not in fp32, where losses compare to 1e-5.

    In bf16 and fp8 the few products left in float32 are still more exact than bf16.
    """
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


def next_precision(identity: Identity, state: State) -> Precision:
    """Return the precision of the step after `state`, without changes that were taken back."""
    return change_before(identity, state.step + 1, state.refused_changes)[1]


def change_before(identity: Identity, step: int, refused: Collection[int]) -> tuple[int, Precision]:
    """Return (first step, precision) of the change that `step` belongs to. Changes of `refused` have no
    effect.

    A run begins with a change at step 1. If no change is left, the precision is bf16.
    """
    first: Precision = filled(identity.train.precision)
    changes = ((1, first), *identity.train.precision_changes)
    begun = [change for change in changes if change[0] <= step and change[0] not in refused]
    return begun[-1] if begun else (1, "bf16")


@dataclass(frozen=True)
class Fp8Probe:
    """A second pass of a batch in bf16, to log the cosine between both gradients, an early sign of
    divergence.

    Called after the backward pass, before clipping. It keeps the gradients, and needs memory for a second
    copy of them. `paused` allows the long time limit, because the first probe compiles attention's kernel.
    """

    forward_backward: ForwardBackward
    model: nn.Module
    mesh: Mesh
    every_steps: int
    total_steps: int
    write: Callable[[Fp8GradientProbe], None]
    paused: Callable[[str], AbstractContextManager[None]]

    def __call__(self, batch: StepBatch) -> None:
        if batch.step % self.every_steps == 0 or batch.step in (1, self.total_steps):
            with self.paused("the probe of FP8's gradients"):
                cosine = self.cosine(batch)
            self.write(Fp8GradientProbe(step=batch.step, fp8_gradient_cosine=cosine))

    def cosine(self, batch: StepBatch) -> float:
        """Return the cosine between the batch's present FP8 gradients and bf16. Waits for the device."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        in_fp8 = [parameter.grad for parameter in parameters]
        norm_fp8 = gradient_norm(self.model, self.mesh)
        try:
            for parameter in parameters:
                parameter.grad = None
            with in_bf16(self.model, self.mesh):
                self.forward_backward(batch)
            norm_bf16 = gradient_norm(self.model, self.mesh)
            for parameter, gradient in zip(parameters, in_fp8, strict=True):
                if parameter.grad is not None and gradient is not None:
                    parameter.grad.sub_(gradient)
            difference = gradient_norm(self.model, self.mesh)
        finally:
            for parameter, gradient in zip(parameters, in_fp8, strict=True):
                parameter.grad = gradient
        # the law of cosines, with norms over all ranks
        return ((norm_fp8**2 + norm_bf16**2 - difference**2) / (2 * norm_fp8 * norm_bf16)).item()
