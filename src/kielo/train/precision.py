"""What "fp32" and "bf16" mean for the matrix products.

`parallel` keeps parameters and gradient sums in float32 and casts to the compute type; this file settles only what a
float32 product may do inside.
"""

import torch


def settle_matrix_products(precision: str) -> None:
    """fp32: true float32, TensorFloat-32 off, so that losses compare to 1e-5. bf16: the few products left in float32
    may use TensorFloat-32, which is still more exact than bf16.
    """
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
