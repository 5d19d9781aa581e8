"""The words of a family's layout table: how a module's parameters lie on the tensor axis; torch-free.

`parallel/tensor_parallel.py` turns each into one of torch's parallel styles, and `plan` predicts from the same table.
"""

WORDS: dict[str, str] = {
    "vocabulary": "rows of the look-up table are split",
    "positions": "a whole look-up table of positions, which are split along the sequence",
    "column": "output features are split (weight dim 0, and the bias)",
    "row": "input features are split (weight dim 1); the bias is whole",
    "gather": "no weight of its own: its first input is made whole along the sequence, once for all modules inside",
    "sequence": "the weight is whole, its input is split along the sequence: gradients are summed over the axis",
    "residual": "as `sequence`, for a norm whose output is added to the residual stream",
    "each_head": "the weight is whole and norms each head by itself; gradients are summed over the axis",
    "all_heads": "the weight is split as the heads are, and norms all of them together",
    "slopes": "no weight: each rank has the ALiBi slopes of its heads",
}
