"""How each parameter of a Gemma 2 or 3 lies on the tensor axis: one word a module.

`*` stands for a layer's number; what the words mean is in `models/layout_words.py`. Modules that a variant
lacks are passed over.
"""

TENSOR_AXIS: dict[str, str] = {
    "embed": "vocabulary",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.q_norm": "each_head",
    "layers.*.attention.k_norm": "each_head",
    "layers.*.attention.o": "row",
    "layers.*.attention_post_norm": "residual",
    "layers.*.mlp_norm": "sequence",
    "layers.*.mlp": "gather",
    "layers.*.mlp.gate": "column",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
    "layers.*.mlp_post_norm": "residual",
    "norm": "sequence",
    "head": "column",
}
