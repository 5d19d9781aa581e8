"""Tensor-parallel plan of a Llama (Mistral, Qwen2, Qwen3): module name → tensor-parallel style.

`*` stands for a layer's number; `models/parameter_shapes.py` says what the styles mean.
Entries for modules that a variant lacks are skipped.
"""

TENSOR_PARALLEL_PLAN: dict[str, str] = {
    "embed": "vocabulary",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention.project": "gather",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.q_norm": "each_head",
    "layers.*.attention.k_norm": "each_head",
    "layers.*.attention.o": "row",
    "layers.*.mlp_norm": "sequence",
    "layers.*.mlp.project": "gather",
    "layers.*.mlp.gate": "column",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
    "norm": "sequence",
    "head": "column",
}
