"""How much each check computes, sends and writes, on GPUs and on CPUs. Constants, not knobs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Sizes of the checks.

    matrix: rows and columns of the matrices whose product is timed. products: products of one timed round.
    copy_bytes: of the device's memory that is copied at once. copies: of one timed round. rounds: timed
    rounds of products and copies, of which the first warms up. message_bytes: sizes of the buffers of
    collectives, from a network's protocol for small messages to that for large ones; the last is timed.
    timed_collectives: how often. file_bytes: that each node writes and reads.
    """

    matrix: int
    products: int
    copy_bytes: int
    copies: int
    rounds: int
    message_bytes: tuple[int, ...]
    timed_collectives: int
    file_bytes: int


SIZES = {
    # 8192³ products: 5 rounds of 40 take 2.4 s at the 92 TFLOP/s of one MI250X die, hot enough to throttle.
    "cuda": Sizes(8192, 40, 2**30, 20, 5, (2**10, 2**20, 2**27), 5, 2**29),
    "cpu": Sizes(256, 20, 2**22, 4, 5, (2**10, 2**18), 3, 2**22),
}
FILE_CHUNK_BYTES = 2**20
STEPS = 5  # of training
CLOCK_ROUNDS = 3
