"""Python's garbage collector at chosen steps, so that no rank waits for another's (as in torchtitan)."""

import gc


class Garbage:
    """The run's cyclic objects. every_steps: 1 if each step leaves cycles with activations."""

    def __init__(self, every_steps: int):
        self._every_steps = every_steps

    def begin(self) -> None:
        """Stop the collector, and exempt the objects that exist, which are the run's parts."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def step(self, step: int) -> None:
        if step % self._every_steps == 0:
            gc.collect(1)

    def collect(self) -> None:
        """Free everything left since `begin`. It is slow, so call it beside saves only."""
        gc.collect()

    def end(self) -> None:
        gc.unfreeze()
        gc.enable()
