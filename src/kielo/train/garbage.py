"""Python's garbage collector at chosen steps, the same on every rank, as in torchtitan.

By its own timing it stops each rank at another time, and all others wait for that rank.
"""

import gc


class Garbage:
    """The objects of a run that refer to each other, which only the collector frees.

    every_steps: 1 if each step leaves such objects with activations.
    """

    def __init__(self, every_steps: int):
        self._every_steps = every_steps

    def begin(self) -> None:
        """Stop the collector, and exempt the objects that exist, which are the run's parts."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def step(self, step: int) -> None:
        """Free what the last steps left, if it is due."""
        if step % self._every_steps == 0:
            gc.collect(1)

    def collect(self) -> None:
        """Free everything left since `begin`. It is slow, so call it beside saves only."""
        gc.collect()

    def end(self) -> None:
        """Return to the collector's own timing."""
        gc.unfreeze()
        gc.enable()
