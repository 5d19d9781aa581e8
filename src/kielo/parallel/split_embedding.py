"""The embedding's rows split over the tensor axis: token ids [b, s] → this rank's part of hidden states.

Each rank looks up the tokens whose rows it has, writes zeros for all others, and the ranks' results are
summed (Shoeybi et al. 2019, arXiv:1909.08053, section 3): scattered along the sequence with sequence
parallelism, whole on each rank without. One addend of each sum is not zero, so the sum is exact in every
precision. The gradient is of the rank's own rows: torch's `RowwiseParallel` gives each rank the gradient of
the whole vocabulary, t times the bytes.

Shape letters: t = tensor ranks, b = batch, s = sequence, d = hidden size.
"""

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F


class SplitEmbedding(ParallelStyle):
    """A vocabulary's embedding whose rows divide by the ranks: each has rows r·v/t up to (r + 1)·v/t.

    output: placement of the hidden states [b, s, d] that come out, of which each rank gets its part as a
    plain tensor.
    """

    def __init__(self, output: Placement) -> None:
        super().__init__()
        self.output = output

    def _apply(self, module: nn.Module, axis: DeviceMesh) -> nn.Module:
        def split(_: str, embedding: nn.Module, axis: DeviceMesh) -> None:
            rows = nn.Parameter(distribute_tensor(embedding.weight, axis, [Shard(0)]))
            embedding.register_parameter("weight", rows)

        distribute_module(module, axis, split)
        module.forward = partial(_look_up, module, axis, self.output)
        return module


def _look_up(embedding: nn.Embedding, axis: DeviceMesh, output: Placement, ids_bs: Tensor) -> Tensor:
    # Not kept from before: FSDP2 replaces the parameter by what it has gathered.
    rows_vd = embedding.weight.to_local()
    row_bs = ids_bs - axis.get_local_rank() * rows_vd.shape[0]
    is_elsewhere_bs = (row_bs < 0) | (row_bs >= rows_vd.shape[0])
    x_bsd = F.embedding(row_bs.masked_fill_(is_elsewhere_bs, 0), rows_vd)
    # This also makes the gradient zero that row 0 gets from the tokens of other ranks.
    x_bsd = x_bsd.masked_fill_(is_elsewhere_bs[..., None], 0)
    summed = DTensor.from_local(x_bsd, axis, [Partial()], run_check=False)
    return summed.redistribute(placements=[output]).to_local()
