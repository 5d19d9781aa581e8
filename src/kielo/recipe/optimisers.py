"""The optimisers, in one table: their state, what an update costs, and what makes it. Torch-free.

A new optimiser is an entry here and the class that it names.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

STATE_BYTES = {"fp32": 4, "bf16": 2}  # of an element of a moment
# Moments kept in bf16 are fp32 for the update, so many bytes of them at a time.
WIDENED_BYTES = 2**28
# Bytes of a parameter through memory in AdamW's part of a step: its gradient read for the norm, read and
# written to be clipped, read and cleared; master weight and two moments read and written; the bf16 weight
# written, and moved once more as it is gathered or copied.
ADAMW_TRAFFIC_BYTES = 46


class OptimiserFacts(NamedTuple):
    """One optimiser.

    made_by: "module:name" of what makes it, from torch's groups of parameters and `TrainIdentity`. Its `step`
    changes nothing where `found_inf` is 1, as that of torch's fused optimisers. moments: names of the state
    that it keeps for each element of a parameter, in a checkpoint too. traffic_bytes: by the dtype of the
    moments, bytes of a parameter through memory in the optimiser's part of a step. widened_bytes: the same,
    bytes of a parameter beside what is kept, at most `WIDENED_BYTES` at a time. whole_update_bytes: bytes
    beside what is kept for each element of the largest parameter. flops: of matrix products, for a parameter.
    only_with: key → the values that it can be combined with; keys that are not in it may have any.
    """

    made_by: str
    about: str
    moments: tuple[str, ...]
    traffic_bytes: Mapping[str, int]
    widened_bytes: Mapping[str, int] = {"fp32": 0, "bf16": 0}
    whole_update_bytes: int = 0
    flops: float = 0.0
    only_with: Mapping[str, tuple[Any, ...]] = {}

    def state_bytes(self, dtype: str) -> int:
        """Return the bytes that are kept for each element of a parameter."""
        return len(self.moments) * STATE_BYTES[dtype]


OPTIMISERS = {
    # Loshchilov and Hutter 2019. Moments in bf16 are read and written as fp32 around the same step.
    "adamw": OptimiserFacts(
        "kielo.train.optimiser:adamw",
        about="",
        moments=("exp_avg", "exp_avg_sq"),
        traffic_bytes={"fp32": ADAMW_TRAFFIC_BYTES, "bf16": ADAMW_TRAFFIC_BYTES + 24},
        widened_bytes={"fp32": 0, "bf16": 8},
    ),
    # You et al. 2020. Each of its operations goes through memory, counted from the class; it makes the update
    # of one parameter, and a part of it, in fp32.
    "lamb": OptimiserFacts(
        "kielo.train.optimiser:Lamb",
        about="Adam with each matrix's step scaled to the matrix's own length, for large batches",
        moments=("exp_avg", "exp_avg_sq"),
        traffic_bytes=dict.fromkeys(STATE_BYTES, ADAMW_TRAFFIC_BYTES + 212),
        whole_update_bytes=8,
    ),
}
