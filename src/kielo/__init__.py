"""Kielo: from a language's raw text to its own language model. Start with train/loop.py, or
`kielo --help`; as a library with `kielo.Recipe` and `kielo.Run`, which are in api.py.
"""

import importlib
from typing import Any

__version__ = "0.1.0"
_OF_API = ("KieloError", "Recipe", "Run", "Stopped", "compare")


def __getattr__(name: str) -> Any:
    if name not in _OF_API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("kielo.api"), name)
