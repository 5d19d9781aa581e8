"""One step's forward and backward passes: a batch → the step's loss, its gradients left on the parameters.

The loss is the sum over counted tokens divided by their number in the whole step, over all ranks and micro-batches,
and that number is known *before* the first backward. So gradients need only be summed, and loss and gradients are the
same for every layout and micro-batch size, however unevenly the counted tokens lie.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kielo.parallel.shard import set_last_micro_batch
from kielo.train.feed import StepBatch
from kielo.train.objective import chunked_loss


class PlainForwardBackward:
    """Micro-batch after micro-batch through the whole model, for every layout without pipeline stages.

    sum_over_data: a tensor's sum over the data ranks. z_loss: weight of the squared log-normaliser (0: none).
    """

    def __init__(
        self, model: nn.Module, sum_over_data: Callable[[Tensor], Tensor], z_loss: float, loss_chunk_tokens: int
    ):
        self._model = model
        self._sum_over_data = sum_over_data
        self._z_loss = z_loss
        self._loss_chunk_tokens = loss_chunk_tokens

    def __call__(self, batch: StepBatch) -> Tensor:
        """float32 scalar on the device: nats per counted token over all ranks, plus the z-loss where there is one."""
        # A step of nothing but padding has loss 0 and no gradient; dividing by 0 would make it look broken.
        divisor = self._sum_over_data(batch.counted_tokens).clamp(min=1).to(torch.float32)
        loss = torch.zeros((), device=divisor.device)
        for number, piece in enumerate(batch.micro_batches, start=1):
            set_last_micro_batch(self._model, number == len(batch.micro_batches))
            hidden_bsd = self._model(piece.inputs_bs, piece.documents_bs)
            # The head is read only now: FSDP2 makes it whole in the forward and keeps it so until the backward.
            part = chunked_loss(
                hidden_bsd, self._model.head.weight, piece.labels_bs, divisor, self._z_loss, self._loss_chunk_tokens
            )
            part.backward()
            loss += part.detach()
        return self._sum_over_data(loss)
