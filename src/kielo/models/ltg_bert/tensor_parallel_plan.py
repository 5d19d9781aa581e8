"""Tensor-parallel plan of an LTG-BERT: module name → tensor-parallel style.

It says which matrices a layer has. `resolve/encoder_check.py` refuses tensor ranks: the norm inside the MLP
needs all of its width, and the relative positions every head's matrices.
"""

TENSOR_PARALLEL_PLAN: dict[str, str] = {
    "embed": "vocabulary",
    "layers.*.attention.project": "gather",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.o": "row",
    "layers.*.attention_post_norm": "sequence",
    "layers.*.mlp.project": "gather",
    "layers.*.mlp.gate": "column",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
    "head": "column",
}
