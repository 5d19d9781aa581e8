"""Parallelism applied to a model, in the only right order. Model on meta → the same model, parallel.

pipeline → FP8 → projections → tensor → context → recomputation → compile → FSDP2. Stages are cut first, and
the rest is applied to each as to a whole model. FP8 replaces matrices, so it comes before the steps that wrap
them. The tensor axis splits parameters before FSDP2 splits the rest. Recomputation wraps the modules that
context parallelism has put into attention, compilation takes all of a layer's computation, and FSDP2 must see
everything. Only `materialise` allocates memory.
"""

from kielo.models.blocks.decoder import Decoder
from kielo.parallel.compile import apply_compile
from kielo.parallel.context_parallel import apply_context_parallel
from kielo.parallel.fp8 import apply_fp8
from kielo.parallel.fsdp import apply_fsdp
from kielo.parallel.mesh import Mesh
from kielo.parallel.pipeline_parallel import Stages, into_stages
from kielo.parallel.projection import apply_projection
from kielo.parallel.recompute import apply_recompute
from kielo.parallel.tensor_parallel import apply_tensor_parallel
from kielo.recipe.sections import Fp8, Layout, Precision, ReduceDtype

_NO_FP8 = Fp8()


def parallelise(
    model: Decoder,
    mesh: Mesh,
    layout: Layout,
    precision: Precision,
    fp8: Fp8 = _NO_FP8,
    gradient_reduce_dtype: ReduceDtype = "fp32",
) -> Decoder | Stages:
    """Apply all axes of `mesh` to `model` (fp32 parameters, on meta). Return it, or this rank's stages."""

    def parallel(model: Decoder) -> Decoder:
        if precision == "fp8":
            apply_fp8(model, mesh, fp8)
        apply_projection(model)
        apply_tensor_parallel(model, mesh, layout)
        apply_context_parallel(model, mesh, layout)
        model.make_masks.is_dense = layout.alibi_kernel == "bias"
        apply_recompute(model, layout)
        if layout.compile:
            apply_compile(model)
        apply_fsdp(model, mesh, layout, precision, gradient_reduce_dtype)
        return model

    return into_stages(model, mesh, layout, parallel) if layout.pipeline > 1 else parallel(model)
