"""The order in which parallelism is put on a model, stated once. Model on meta → the same model, laid out.

pipeline → FP8 → tensor → context → recomputation → compile → shard. Stages are cut first, so that no rank
lays out what others have, and the rest is done to each of them as to a whole model. FP8 puts other modules in
the place of matrices, so it comes before whatever wraps them. The tensor axis splits parameters, so it comes
before FSDP2, which splits what is left; recomputation must wrap what attention became, compilation takes all
that a layer computes, and FSDP2 must see all. Each step changes modules in place; only `materialise` gives
memory.
"""

from typing import TYPE_CHECKING

from torch import nn

from kielo.parallel.compile import lay_compile
from kielo.parallel.context_parallel import lay_context
from kielo.parallel.fp8 import lay_fp8
from kielo.parallel.fsdp import shard
from kielo.parallel.mesh import Mesh
from kielo.parallel.pipeline_parallel import into_stages
from kielo.parallel.recompute import lay_recompute
from kielo.parallel.tensor_parallel import lay_tensor
from kielo.recipe.sections import Fp8

if TYPE_CHECKING:
    from kielo.recipe.sections import Precision
    from kielo.resolve.resolved import Placement

_NO_FP8 = Fp8()


def lay_out(
    model: nn.Module, mesh: Mesh, placement: "Placement", precision: "Precision", fp8: Fp8 = _NO_FP8
) -> nn.Module:
    """Lay `model` (fp32 parameters, on the meta device) over `mesh`; returns it, or this rank's stages of it.

    fp8: how, where `precision` is fp8.
    """
    if placement.pipeline > 1:
        return into_stages(
            model, mesh, placement, lambda part: _lay_out_part(part, mesh, placement, precision, fp8)
        )
    return _lay_out_part(model, mesh, placement, precision, fp8)


def _lay_out_part(
    model: nn.Module, mesh: Mesh, placement: "Placement", precision: "Precision", fp8: Fp8
) -> nn.Module:
    if precision == "fp8":
        lay_fp8(model, mesh, fp8)
    lay_tensor(model, mesh, placement)
    lay_context(model, mesh, placement)
    lay_recompute(model, placement)
    if placement.compile:
        lay_compile(model)
    shard(model, mesh, placement, precision)
    return model
