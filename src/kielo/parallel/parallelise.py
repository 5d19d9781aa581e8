"""The order in which parallelism is put on a model, stated once. Model on meta → the same model, laid out.

pipeline → FP8 → tensor → context → recomputation → compile → shard. Stages are cut first, so that no rank
lays out what others have, and the rest is done to each of them as to a whole model. FP8 puts other modules in
the place of matrices, so it comes before whatever wraps them. The tensor axis splits parameters, so it comes
before FSDP2, which splits what is left; recomputation must wrap what attention became, compilation takes all
that a layer computes, and FSDP2 must see all. Each step changes modules in place; only `materialise` gives
memory.
"""

from torch import nn

from kielo.parallel.compile import apply_compile
from kielo.parallel.context_parallel import apply_context_parallel
from kielo.parallel.fp8 import apply_fp8
from kielo.parallel.fsdp import apply_fsdp
from kielo.parallel.mesh import Mesh
from kielo.parallel.pipeline_parallel import into_stages
from kielo.parallel.recompute import apply_recompute
from kielo.parallel.tensor_parallel import apply_tensor_parallel
from kielo.recipe.sections import Fp8, Precision
from kielo.resolve.resolved import Placement

_NO_FP8 = Fp8()


def parallelise(
    model: nn.Module, mesh: Mesh, placement: Placement, precision: Precision, fp8: Fp8 = _NO_FP8
) -> nn.Module:
    """Lay `model` (fp32 parameters, on the meta device) over `mesh`; returns it, or this rank's stages of it.

    fp8: how, where `precision` is fp8.
    """
    if placement.pipeline > 1:
        return into_stages(
            model, mesh, placement, lambda part: _parallelise_part(part, mesh, placement, precision, fp8)
        )
    return _parallelise_part(model, mesh, placement, precision, fp8)


def _parallelise_part(
    model: nn.Module, mesh: Mesh, placement: Placement, precision: Precision, fp8: Fp8
) -> nn.Module:
    if precision == "fp8":
        apply_fp8(model, mesh, fp8)
    apply_tensor_parallel(model, mesh, placement)
    apply_context_parallel(model, mesh, placement)
    apply_recompute(model, placement)
    if placement.compile:
        apply_compile(model)
    apply_fsdp(model, mesh, placement, precision)
    return model
