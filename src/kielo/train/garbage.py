"""Python's garbage collector at chosen steps, the same ones on every rank.

Left to itself it stops each rank at another time, and all others wait for that rank. (As in torchtitan.)
"""

import gc


class Garbage:
    """The garbage of a run: objects that refer to each other, which only the collector frees.

    every_steps: 1 where each step leaves such objects with activations in them.
    """

    def __init__(self, every_steps: int):
        self._every_steps = every_steps

    def begin(self) -> None:
        """Stop the collector; what exists, which is the run's parts, is not looked through any more."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def step(self, step: int) -> None:
        """Free what the last steps left, if it is time."""
        if step % self._every_steps == 0:
            gc.collect(1)

    def collect(self) -> None:
        """Free all that was left since `begin`; slower, so beside saves only."""
        gc.collect()

    def end(self) -> None:
        """Give the collector its own timing back, and the run's parts to it."""
        gc.unfreeze()
        gc.enable()
