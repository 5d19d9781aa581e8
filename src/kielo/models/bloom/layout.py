"""How each parameter of a BLOOM lies on the tensor axis: one word a module.

`*` stands for a layer's number; what the words mean is in `models/layout_words.py`.
"""

TENSOR_AXIS: dict[str, str] = {
    "embed": "vocabulary",
    "embed_norm": "residual",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.inner.alibi": "slopes",
    "layers.*.attention.o": "row",
    "layers.*.mlp_norm": "sequence",
    "layers.*.mlp": "gather",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
    "norm": "sequence",
    "head": "column",
}
