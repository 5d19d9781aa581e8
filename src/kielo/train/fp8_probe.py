"""How far FP8's gradients point where those in bf16 do: late divergence announces itself there."""

from collections.abc import Callable

from torch import Tensor, nn

from kielo.artifact.metrics import Fp8GradientProbe
from kielo.parallel.fp8 import in_bf16
from kielo.parallel.mesh import Mesh
from kielo.parallel.norm import gradient_norm
from kielo.train.feed import MicroBatch, StepBatch
from kielo.train.forward_backward import ForwardBackward


class Fp8Probe:
    """A `ForwardBackward` that now and then goes through a batch once more, in bf16, and writes the cosine
    between the two gradients down. The step itself is as it would be without. Costs a second copy of the
    gradients while it looks.
    """

    def __init__(
        self,
        forward_backward: ForwardBackward,
        model: nn.Module,
        mesh: Mesh,
        every_steps: int,
        total_steps: int,
        write: Callable[[Fp8GradientProbe], None],
    ):
        self._forward_backward, self._model, self._mesh = forward_backward, model, mesh
        self._every_steps, self._total_steps, self._write = every_steps, total_steps, write

    def __call__(self, batch: StepBatch) -> Tensor:
        loss = self._forward_backward(batch)
        if batch.step % self._every_steps == 0 or batch.step in (1, self._total_steps):
            self._write(Fp8GradientProbe(step=batch.step, fp8_gradient_cosine=self.cosine(batch)))
        return loss

    def score(self, piece: MicroBatch, divisor: Tensor, z_loss: float) -> Tensor:
        return self._forward_backward.score(piece, divisor, z_loss)

    def cosine(self, batch: StepBatch) -> float:
        """Between the gradients that lie on the parameters, of `batch` in FP8, and those in bf16. Waits for
        the device.
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
        # By the law of cosines; the norms are summed over all ranks already.
        return ((norm_fp8**2 + norm_bf16**2 - difference**2) / (2 * norm_fp8 * norm_bf16)).item()
