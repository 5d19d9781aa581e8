"""The precision of float32 matrix products, and the precision in which each step is computed.

`parallel` keeps parameters and gradient sums in float32 and casts to the compute type; what is set here is
what a float32 product may do internally.
"""

from collections.abc import Collection

import torch

from kielo.recipe.sections import Precision
from kielo.resolve.resolved import Identity
from kielo.train.state import State


def settle_matrix_products(precision: Precision) -> None:
    """Sets whether float32 products may use TensorFloat-32.

    fp32: no, so that losses compare to 1e-5. bf16 and fp8: the few products left in float32 may, which is
    still more exact than bf16.
    """
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


def next_precision(identity: Identity, state: State) -> Precision:
    """Returns the precision of the step after `state`: the recipe's, without changes that were taken back."""
    return change_before(identity, state.step + 1, state.refused_changes)[1]


def change_before(identity: Identity, step: int, refused: Collection[int]) -> tuple[int, Precision]:
    """Returns (first step, precision) of the change that step `step` belongs to.

    A run begins with a change at step 1. refused: first steps of changes that do not count. Where none is
    left it is bf16.
    """
    changes = ((1, identity.train.precision), *identity.train.precision_changes)
    begun = [change for change in changes if change[0] <= step and change[0] not in refused]
    return begun[-1] if begun else (1, "bf16")
