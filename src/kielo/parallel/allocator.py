"""Settings of torch's allocator of device memory, which torch reads from the environment when CUDA starts."""

import os

_VARIABLE = "PYTORCH_ALLOC_CONF"
_VARIABLES = (_VARIABLE, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # names of the same settings


def settle_allocator(settings: str) -> str:
    """Sets an accelerator card's settings, unless the environment has some; returns a sentence about them.

    Must be called before CUDA starts, which is when torch reads them. Returns "" if nothing was set.
    """
    if not settings or any(name in os.environ for name in _VARIABLES):
        return ""
    os.environ[_VARIABLE] = settings
    return f"{_VARIABLE}={settings} (the accelerator card's; a value in the environment takes its place)"
