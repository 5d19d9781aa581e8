"""How each Llama parameter lies on the tensor axis: one word a module, `*` stands for a layer's number.

`parallel` shards by this table and `plan` predicts from it, so that the two cannot drift.

vocabulary   rows of the look-up table are split
column       output features are split (weight dim 0, and the bias)
row          input features are split (weight dim 1); the bias is whole
sequence     the weight is whole, its input is split along the sequence: gradients are summed over the axis
gather       no weight of its own: its first input is made whole along the sequence, once for all modules inside
"""

TENSOR_AXIS: dict[str, str] = {
    "embed": "vocabulary",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.o": "row",
    "layers.*.mlp_norm": "sequence",
    "layers.*.mlp": "gather",
    "layers.*.mlp.gate": "column",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
    "norm": "sequence",
    "head": "column",
}
