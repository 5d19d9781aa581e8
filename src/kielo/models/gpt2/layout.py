"""How each parameter of a GPT-2 lies on the tensor axis: one word a module.

`*` stands for a layer's number; what the words mean is in `models/layout_words.py`.
"""

TENSOR_AXIS: dict[str, str] = {
    "embed": "vocabulary",
    "position_table": "positions",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.o": "row",
    "layers.*.mlp_norm": "sequence",
    "layers.*.mlp": "gather",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
    "norm": "sequence",
    "head": "column",
}
