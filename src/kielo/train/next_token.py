"""From a micro-batch to the loss of predicting each next token, for every layout without pipeline stages."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from kielo.parallel.mesh import Mesh
from kielo.parallel.tensor import gather_sequence
from kielo.train.feed import MicroBatch
from kielo.train.objective import chunked_loss


@dataclass(frozen=True)
class NextToken:
    """`objective(model, piece, divisor)` is this rank's share of the loss, a scalar in fp32 (see `chunked_loss`).

    group: the tensor axis, whose ranks hold a part of the sequence and of the vocabulary each; None: one rank.
    """

    z_loss: float
    chunk_tokens: int
    group: dist.ProcessGroup | None = None

    def __call__(self, model: nn.Module, piece: MicroBatch, divisor: Tensor) -> Tensor:
        hidden_bsd = model(piece.inputs_bs, piece.documents_bs, piece.positions_s)
        hidden_bsd = gather_sequence(hidden_bsd)
        # The head is read only now: FSDP2 makes it whole in the forward and keeps it so until the backward.
        weight = model.head.weight
        return chunked_loss(hidden_bsd, weight, piece.labels_bs, divisor, self.z_loss, self.chunk_tokens, self.group)


def tensor_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """The tensor axis as `NextToken` wants it."""
    return mesh["tensor"].get_group() if mesh["tensor"].size() > 1 else None
