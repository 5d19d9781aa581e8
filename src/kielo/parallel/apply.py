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
from kielo.parallel.context import lay_context
from kielo.parallel.fp8 import lay_fp8
from kielo.parallel.mesh import Mesh
from kielo.parallel.pipeline import into_stages
from kielo.parallel.recompute import lay_recompute
from kielo.parallel.shard import shard
from kielo.parallel.tensor import lay_tensor
from kielo.recipe.sections import Fp8, Layout

if TYPE_CHECKING:
    from kielo.recipe.sections import Precision

_NO_FP8 = Fp8()


def lay_out(
    model: nn.Module, mesh: Mesh, layout: Layout, precision: "Precision", fp8: Fp8 = _NO_FP8
) -> nn.Module:
    """Lay `model` (fp32 parameters, on the meta device) over `mesh`; returns it, or this rank's stages of it.

    fp8: how, where `precision` is fp8.
    """
    if layout.pipeline > 1:
        return into_stages(
            model, mesh, layout, lambda part: _lay_out_part(part, mesh, layout, precision, fp8)
        )
    return _lay_out_part(model, mesh, layout, precision, fp8)


def _lay_out_part(
    model: nn.Module, mesh: Mesh, layout: Layout, precision: "Precision", fp8: Fp8
) -> nn.Module:
    if precision == "fp8":
        lay_fp8(model, mesh, fp8)
    lay_tensor(model, mesh, layout)
    lay_context(model, mesh, layout)
    lay_recompute(model, layout)
    if layout.compile:
        lay_compile(model)
    shard(model, mesh, layout, precision)
    return model
