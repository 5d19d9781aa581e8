"""What "fp32", "bf16" and "fp8" mean for the matrix products, and which of them a step is computed in.

`parallel` keeps parameters and gradient sums in float32 and casts to the compute type; what is settled here
is what a float32 product may do inside.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from kielo.recipe.sections import Precision

if TYPE_CHECKING:
    from kielo.resolve.resolved import Identity
    from kielo.train.state import State


def settle_matrix_products(precision: Precision) -> None:
    """fp32: true float32, TensorFloat-32 off, so that losses compare to 1e-5. bf16 and fp8: the few products
    left in float32 may use TensorFloat-32, which is still more exact than bf16.
    """
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


def next_precision(identity: "Identity", state: "State") -> Precision:
    """What the step after those of `state` is to be computed in: as the recipe says, but for changes that
    were taken back.
    """
    return change_before(identity, state.step + 1, state.refused_changes)[1]


def change_before(identity: "Identity", step: int, refused: Collection[int]) -> tuple[int, Precision]:
    """(from which step on, in which precision) step `step` is to be computed; what a run begins with is a
    change at step 1.

    refused: first steps of changes that do not count. Where none is left it is bf16.
    """
    changes = ((1, identity.train.precision), *identity.train.precision_changes)
    begun = [change for change in changes if change[0] <= step and change[0] not in refused]
    return begun[-1] if begun else (1, "bf16")
