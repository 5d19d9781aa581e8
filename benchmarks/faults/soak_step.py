"""Steps of a soak: they wait, as for devices, and a signal flips a bit of a weight. For `soak.py` alone.

Its run's Pythons load this file as `sitecustomize`. It wraps the training loop's `optimiser_step` when that
is imported, which happens only in the ranks and in the process that they are forked from.
"""

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

FLIP_SIGNAL = signal.SIGRTMIN + 3
WAIT_SECONDS = "KIELO_SOAK_WAIT_SECONDS"  # environment variable: what each step waits
_LOOP = "kielo.train.loop"
_BIT = 20  # of 32: in the middle of a float's fraction


class Wrapper:
    """Finds the module of the training loop, once, and wraps its step."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != _LOOP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            module.optimiser_step = _wrapped(module.optimiser_step)

        spec.loader.exec_module = execute_and_wrap
        return spec


def _wrapped(step: Callable) -> Callable:
    asked = []
    signal.signal(FLIP_SIGNAL, lambda *_: asked.append(True))

    def wrapped(parts: object, *arguments: object) -> object:
        outcome = step(parts, *arguments)
        if asked:
            asked.clear()
            _flip(parts)
        time.sleep(float(os.environ.get(WAIT_SECONDS, "0")))
        return outcome

    return wrapped


def _flip(parts: object) -> None:
    """Flips a bit of the first weight that this rank holds."""
    import torch

    from kielo.parallel.materialise import local

    weights = local(next(iter(parts.optimiser.parameters.values()))).detach()
    weights.view(torch.int32).view(-1)[0] ^= 1 << _BIT


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Wrapper())
