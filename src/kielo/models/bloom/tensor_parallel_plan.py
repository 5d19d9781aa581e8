"""Tensor-parallel plan of a BLOOM: module name → tensor-parallel style.

`*` stands for a layer's number; `models/parameter_shapes.py` says what the styles mean.
"""

TENSOR_PARALLEL_PLAN: dict[str, str] = {
    "embed": "vocabulary",
    "embed_norm": "residual",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention.project": "gather",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.inner.alibi": "slopes",
    "layers.*.attention.o": "row",
    "layers.*.mlp_norm": "sequence",
    "layers.*.mlp.project": "gather",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
    "norm": "sequence",
    "head": "column",
}
