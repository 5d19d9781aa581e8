"""One step's forward and backward passes: a batch → the step's loss, its gradients left on the parameters.

The loss is the sum over counted tokens divided by their number in the whole step, over all ranks and
micro-batches, and that number is known *before* the first backward. So gradients need only be summed, and
loss and gradients are the same for every layout and micro-batch size, however unevenly counted tokens are
spread.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from kielo.parallel.fsdp import COMPUTE_DTYPES, set_last_micro_batch
from kielo.parallel.mesh import Mesh, sum_over_data
from kielo.recipe.sections import Layout, Precision, TrainIdentity
from kielo.resolve.stages import SCHEDULES
from kielo.train.feed import MicroBatch, StepBatch
from kielo.train.next_token import NextToken, tensor_axis
from kielo.train.pipeline_forward_backward import PipelineForwardBackward


class PlainForwardBackward:
    """Passes each micro-batch through the whole model, for every layout without pipeline stages.

    sum_over_data: a tensor's sum over the ranks that see different tokens.
    """

    def __init__(self, model: nn.Module, objective: NextToken, sum_over_data: Callable[[Tensor], Tensor]):
        self._model = model
        self._objective = objective
        self._sum_over_data = sum_over_data
        self.own_loss: Tensor | None = None  # of the last step, this rank's part before any sum

    def __call__(self, batch: StepBatch) -> Tensor:
        """Returns the loss, a float32 scalar on the device; the gradients are left on the parameters.

        It is in nats per counted token over all ranks, with the z-loss where there is one.
        """
        # A step of padding only has loss 0 and no gradient; dividing by 0 would make it not finite.
        divisor = self._sum_over_data(batch.counted_tokens).clamp(min=1).to(torch.float32)
        loss = torch.zeros((), device=divisor.device)
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            set_last_micro_batch(self._model, number == len(batch.micro_batches))
            part = self._objective(self._model, micro_batch, divisor)
            part.backward()
            loss += part.detach()
        self.own_loss = loss
        return self._sum_over_data(loss)

    def score(self, micro_batch: MicroBatch, divisor: Tensor, z_loss: float) -> Tensor:
        """Returns this rank's share of the loss, with another z-loss; no gradients."""
        return replace(self._objective, z_loss=z_loss)(self._model, micro_batch, divisor)


ForwardBackward = PlainForwardBackward | PipelineForwardBackward


def forward_backward_of(
    model: nn.Module,
    mesh: Mesh,
    train: TrainIdentity,
    loss_chunk_tokens: int,
    layout: Layout,
    precision: Precision,
) -> ForwardBackward:
    """Builds the forward and backward passes of `model`, which is laid out over `mesh`."""
    sum_over_ranks = partial(sum_over_data, mesh=mesh)
    goes_twice = layout.pipeline > 1 and SCHEDULES[layout.pipeline_schedule].splits_backward
    splits_sequence = layout.tensor > 1 and layout.sequence_parallel
    objective = NextToken(
        train.z_loss,
        loss_chunk_tokens,
        tensor_axis(mesh),
        goes_twice,
        layout.compile,
        splits_sequence,
        picks_counted=train.objective == "masked_tokens",
    )
    if layout.pipeline == 1:
        return PlainForwardBackward(model, objective, sum_over_ranks)
    return PipelineForwardBackward(
        model,
        objective,
        sum_over_ranks,
        mesh,
        layout.pipeline_schedule,
        splits_sequence,
        COMPUTE_DTYPES[precision],
    )
