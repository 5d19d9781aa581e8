"""The order in which parallelism is put on a model, stated once. Model on meta → the same model, laid out.

pipeline → tensor → context → recomputation → (FP8, compile: later rooms) → shard. Stages are cut first, so that no
rank lays out what others have, and the rest is done to each of them as to a whole model. The tensor axis splits
parameters, so it comes before FSDP2, which splits what is left; recomputation must wrap what attention became, and
FSDP2 must see all. Each step changes modules in place; only `materialise` gives memory.
"""

from typing import TYPE_CHECKING, Literal

from torch import nn

from kielo.parallel.context import lay_context
from kielo.parallel.mesh import Mesh
from kielo.parallel.pipeline import into_stages
from kielo.parallel.recompute import lay_recompute
from kielo.parallel.shard import shard
from kielo.parallel.tensor import lay_tensor

if TYPE_CHECKING:
    from kielo.plan.resolved import Placement


def lay_out(
    model: nn.Module, mesh: Mesh, placement: "Placement", precision: Literal["fp32", "bf16"]
) -> nn.Module:
    """Lay `model` (fp32 parameters, on the meta device) over `mesh`; returns it, or this rank's stages of it."""
    if placement.pipeline > 1:
        return into_stages(model, mesh, placement, lambda part: _lay_out_part(part, mesh, placement, precision))
    return _lay_out_part(model, mesh, placement, precision)


def _lay_out_part(
    model: nn.Module, mesh: Mesh, placement: "Placement", precision: Literal["fp32", "bf16"]
) -> nn.Module:
    lay_tensor(model, mesh, placement)
    lay_context(model, mesh, placement)
    lay_recompute(model, placement)
    shard(model, mesh, placement, precision)
    return model
