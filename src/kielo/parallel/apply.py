"""The order in which parallelism is put on a model, stated once. Model on meta → the same model, laid out.

tensor and context axes → recomputation → FP8 → compile, each a later room, then `shard` (FSDP2) last: it must
see the parameters as the others leave them. Each step changes modules in place; only `materialise` gives memory.
"""

from typing import TYPE_CHECKING, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from kielo.parallel.shard import shard

if TYPE_CHECKING:
    from kielo.plan.resolved import Placement


def lay_out(
    model: nn.Module, mesh: DeviceMesh, placement: "Placement", precision: Literal["fp32", "bf16"]
) -> nn.Module:
    """Lay `model` (fp32 parameters, best on the meta device) over `mesh` in place; returns it."""
    shard(model, mesh, placement, precision)
    return model
