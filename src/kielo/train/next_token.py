"""From a micro-batch to the loss of predicting each next token, for every layout without pipeline stages."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from kielo.parallel.mesh import Mesh
from kielo.parallel.tensor import gather_sequence
from kielo.train.feed import MicroBatch
from kielo.train.objective import chunked_loss


@dataclass(frozen=True)
class NextToken:
    """`objective(model, piece, divisor)` is this rank's share of the loss, a scalar in fp32 (see `chunked_loss`).

    tensor_axis: the ranks that each hold a part of the vocabulary; None: this one holds it all.
    """

    z_loss: float
    chunk_tokens: int
    tensor_axis: DeviceMesh | None = None

    def __call__(self, model: nn.Module, piece: MicroBatch, divisor: Tensor) -> Tensor:
        hidden_bsd = model(piece.inputs_bs, piece.documents_bs, piece.positions_s)
        group = None
        if self.tensor_axis is not None:
            hidden_bsd, group = gather_sequence(hidden_bsd, self.tensor_axis), self.tensor_axis.get_group()
        # The head is read only now: FSDP2 makes it whole in the forward and keeps it so until the backward.
        weight = model.head.weight
        return chunked_loss(hidden_bsd, weight, piece.labels_bs, divisor, self.z_loss, self.chunk_tokens, group)


def tensor_axis(mesh: Mesh) -> DeviceMesh | None:
    """The tensor axis as `NextToken` wants it."""
    axis = mesh.parameters["tensor"]
    return axis if axis.size() > 1 else None
