"""The styles of a family's tensor-parallel plan: how a module is split over the tensor axis; torch-free.

`parallel/tensor_parallel.py` turns each into one of torch's parallel styles, and `resolve` and `plan` count
bytes with the same plan.
"""

STYLES: dict[str, str] = {
    "vocabulary": "the embedding: its rows are split",
    "positions": "the embedding of positions: its weight is whole, its output is split along the sequence",
    "column": "output features are split (weight dim 0, and the bias)",
    "row": "input features are split (weight dim 1); the bias is whole",
    "gather": "no weight: the input of several matrices is gathered along the sequence, once for all",
    "sequence": "the weight is whole, its input is split along the sequence; gradients are summed",
    "whole": "a matrix whose weight is whole, its input is split along the sequence; gradients are summed",
    "residual": "as `sequence`, for a norm whose output is added to the residual stream",
    "each_head": "the weight is whole and norms each head by itself; gradients are summed",
    "all_heads": "the weight is split as the heads are, and norms all of them together",
    "whole_input": "no weight: the input of several matrices is whole on each rank, its gradient is summed",
    "features": "no weight: a norm over features that are split",
    "position_heads": "no weight: each rank has the relative positions of its heads",
    "slopes": "no weight: each rank has the ALiBi slopes of its heads",
}


def style_of(plan: dict[str, str], module_name: str) -> str | None:
    """The style that a family's plan gives a module; None for a module that it does not name."""
    return plan.get(".".join("*" if part.isdigit() else part for part in module_name.split(".")))
