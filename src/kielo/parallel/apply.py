"""The order in which parallelism is put on a model, stated once. Model on meta → the same model, laid out.

tensor → context → recomputation → (FP8, compile: later rooms) → shard. The tensor axis splits parameters, so it
comes before FSDP2, which splits what is left; recomputation must wrap what attention became, and FSDP2 must see all.
Each step changes modules in place; only `materialise` gives memory.
"""

from typing import TYPE_CHECKING, Literal

from torch import nn

from kielo.parallel.context import lay_context
from kielo.parallel.mesh import Mesh
from kielo.parallel.recompute import lay_recompute
from kielo.parallel.shard import shard
from kielo.parallel.tensor import lay_tensor

if TYPE_CHECKING:
    from kielo.plan.resolved import Placement


def lay_out(
    model: nn.Module, mesh: Mesh, placement: "Placement", precision: Literal["fp32", "bf16"]
) -> nn.Module:
    """Lay `model` (fp32 parameters, best on the meta device) over `mesh` in place; returns it."""
    lay_tensor(model, mesh, placement)
    lay_context(model, mesh, placement)
    lay_recompute(model, placement)
    shard(model, mesh, placement, precision)
    return model
