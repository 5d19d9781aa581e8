"""Tensor-parallel plan of an OLMo 2 or 3: module name → tensor-parallel style.

`*` stands for a layer's number; `models/parameter_shapes.py` says what the styles mean.
"""

TENSOR_PARALLEL_PLAN: dict[str, str] = {
    "embed": "vocabulary",
    "layers.*.attention.project": "gather",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.q_norm": "all_heads",
    "layers.*.attention.k_norm": "all_heads",
    "layers.*.attention.o": "row",
    "layers.*.attention_post_norm": "residual",
    "layers.*.mlp.project": "gather",
    "layers.*.mlp.gate": "column",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
    "layers.*.mlp_post_norm": "residual",
    "norm": "sequence",
    "head": "column",
}
