"""Tensor-parallel plan of an LTG-BERT: module name → tensor-parallel style.

`*` stands for a layer's number; `models/parameter_shapes.py` says what the styles mean. Norms that are
not named have no weights and norm each token by itself. The table of relative positions and its norm are on
every rank, which computes them from the same numbers.
"""

TENSOR_PARALLEL_PLAN: dict[str, str] = {
    "embed": "vocabulary",
    "layers.*.attention.project": "gather",
    "layers.*.attention.project_positions": "whole_input",
    "layers.*.attention.position_heads": "position_heads",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.o": "row",
    "layers.*.attention_post_norm": "residual",
    "layers.*.mlp.project": "gather",
    "layers.*.mlp.gate": "column",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.norm": "features",
    "layers.*.mlp.down": "row",
    "transform.dense": "whole",
    "head": "column",
}
