"""Tensor-parallel plan of a GPT-2: module name → tensor-parallel style.

`*` stands for a layer's number; `models/parameter_shapes.py` says what the styles mean.
"""

TENSOR_PARALLEL_PLAN: dict[str, str] = {
    "embed": "vocabulary",
    "position_table": "positions",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention.project": "gather",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.o": "row",
    "layers.*.mlp_norm": "sequence",
    "layers.*.mlp.project": "gather",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
    "norm": "sequence",
    "head": "column",
}
