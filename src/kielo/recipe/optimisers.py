"""The optimisers in one table: state, cost, constructor. An entry and its class add an optimiser."""

from collections.abc import Mapping
from typing import Any, NamedTuple

STATE_BYTES = {"fp32": 4, "bf16": 2}  # of an element of a moment
# Moments in bf16 are widened to fp32 for the update, this many bytes at a time.
WIDENED_BYTES = 2**28
# Bytes of memory traffic of a parameter in AdamW's part of a step: its gradient is read for the norm, read
# and written when clipped, read and cleared; master weight and two moments are read and written; the bf16
# weight is written, and moved once more when gathered or copied.
ADAMW_TRAFFIC_BYTES = 46


class OptimiserFacts(NamedTuple):
    """An optimiser.

    made_by: "module:name" of its constructor, called with torch's groups of parameters and `TrainIdentity`.
    Its `step` changes nothing if `found_inf` is 1, as in torch's fused optimisers. moments: names of its
    state for each element of a parameter, also in a checkpoint. traffic_bytes: dtype of moments → memory
    traffic of a parameter in the optimiser's part of a step. widened_bytes: dtype of moments → temporary
    bytes of a parameter, at most `WIDENED_BYTES` at a time. whole_update_bytes: temporary bytes for each
    element of the largest parameter. flops: FLOPs of matrix products for a parameter. only_with: key → the
    values that the optimiser works with. Other keys are free.
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
    # You et al. 2020. Traffic is counted from the class: each operation goes through memory. The update of a
    # parameter, and a part of it, are in fp32.
    "lamb": OptimiserFacts(
        "kielo.train.optimiser:Lamb",
        about="Adam with each matrix's step scaled to the matrix's own length, for large batches",
        moments=("exp_avg", "exp_avg_sq"),
        traffic_bytes=dict.fromkeys(STATE_BYTES, ADAMW_TRAFFIC_BYTES + 212),
        whole_update_bytes=8,
    ),
}
