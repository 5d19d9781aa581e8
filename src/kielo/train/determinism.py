"""Kernels that give the same bits each time, on every device: the settings of train.deterministic."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch._inductor.config as inductor_config

# Two workspaces of 4 MiB a stream, of the two values with which cuBLAS promises equal results (its manual,
# "Results reproducibility").
_CUBLAS_WORKSPACE = ":4096:8"


@contextmanager
def determinism(is_wanted: bool) -> Iterator[None]:
    """Makes torch use deterministic kernels only, until the end; begun before the first product on a GPU.

    Flash attention's backward then adds in a fixed order, cuDNN's attention is not used, and Inductor chooses
    kernels by rule and not by timing. An operator without such a kernel raises RuntimeError.
    """
    if not is_wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE)
    # No kernel of training reads memory that none has written, so it need not be filled first.
    changed = (
        (torch.utils.deterministic, "fill_uninitialized_memory", False),
        (torch.backends.cudnn, "deterministic", True),
        (torch.backends.cudnn, "benchmark", False),
        (inductor_config, "deterministic", True),
    )
    before = [getattr(owner, name) for owner, name, _ in changed]
    was_on, warned_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    try:
        for owner, name, value in changed:
            setattr(owner, name, value)
        torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
        for (owner, name, _), value in zip(changed, before):
            setattr(owner, name, value)
