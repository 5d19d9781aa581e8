"""The angle between FP8's gradients and those in bf16: an early sign of late divergence."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import nn

from kielo.artifact.metrics import Fp8GradientProbe
from kielo.parallel.fp8 import in_bf16
from kielo.parallel.gradient_clipping import gradient_norm
from kielo.parallel.mesh import Mesh
from kielo.train.feed import StepBatch
from kielo.train.forward_backward import ForwardBackward


class Fp8Probe:
    """Runs a batch once more in bf16 every `every_steps` steps and logs the cosine between both gradients.

    Called after the backward pass, before clipping; the gradients stay as they were. Costs a second copy of
    the gradients meanwhile. paused: allows work of this name the long limit, because the first probe of an
    attempt compiles attention's kernel.
    """

    def __init__(
        self,
        forward_backward: ForwardBackward,
        model: nn.Module,
        mesh: Mesh,
        every_steps: int,
        total_steps: int,
        write: Callable[[Fp8GradientProbe], None],
        paused: Callable[[str], AbstractContextManager[None]],
    ):
        self._forward_backward, self._model, self._mesh = forward_backward, model, mesh
        self._every_steps, self._total_steps, self._write = every_steps, total_steps, write
        self._paused = paused

    def __call__(self, batch: StepBatch) -> None:
        if batch.step % self._every_steps == 0 or batch.step in (1, self._total_steps):
            with self._paused("the probe of FP8's gradients"):
                cosine = self.cosine(batch)
            self._write(Fp8GradientProbe(step=batch.step, fp8_gradient_cosine=cosine))

    def cosine(self, batch: StepBatch) -> float:
        """The cosine between the parameters' gradients of `batch`, made in FP8, and those in bf16.

        Waits for the device.
        """
        parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        in_fp8, norm_fp8 = (
            [parameter.grad for parameter in parameters],
            gradient_norm(self._model, self._mesh),
        )
        try:
            for parameter in parameters:
                parameter.grad = None
            with in_bf16(self._model, self._mesh):
                self._forward_backward(batch)
            norm_bf16 = gradient_norm(self._model, self._mesh)
            for parameter, gradient in zip(parameters, in_fp8, strict=True):
                parameter.grad.sub_(gradient)
            difference = gradient_norm(self._model, self._mesh)
        finally:
            for parameter, gradient in zip(parameters, in_fp8, strict=True):
                parameter.grad = gradient
        # The law of cosines; the norms are already those over all ranks.
        return ((norm_fp8**2 + norm_bf16**2 - difference**2) / (2 * norm_fp8 * norm_bf16)).item()
