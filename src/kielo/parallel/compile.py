"""Compilation of each layer by torch.compile (Ansel et al. 2024, doi:10.1145/3620665.3640366), in place.

Layers of one kind share their code, and FSDP2 gathers and scatters between them. Earlier wrappers of a
layer's forward, such as recomputation, are compiled with it. Later wrappers (FSDP2's hooks) stay outside.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._functorch import partitioners
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from kielo.models.blocks.decoder import Decoder
from kielo.recipe.errors import KieloError
from kielo.resolve.software import chosen_backend, missing_compiler

# Limit of the versions of one layer's code; layers beyond the limit run uncompiled. torch's is 8.
# Each shape of a micro-batch (of phases, of held-out text), each kind of mask, and evaluation has a version.
_VERSIONS = 64


def apply_compile(model: Decoder) -> None:
    """Compile the forward of each of `model.layers`. KieloError without a compiler or Python's headers."""
    missing = missing_compiler(_device())
    if missing is not None:
        raise KieloError(f"layout.compile: {missing}, or layout.compile = false")
    backend = chosen_backend()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VERSIONS)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        _keep_no_random_state()
    layers: list[Any] = list(model.layers.values())
    for layer in layers:
        layer.uncompiled_forward = layer.forward
        # Not layer.compile(): it compiles a module's hooks too, and ignores a forward that was replaced.
        layer.forward = torch.compile(layer.forward, dynamic=False, backend=backend)
    for layer in layers[:1]:
        layer.register_forward_pre_hook(_wait)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run layers without their compiled code. Kernels such as FlexAttention compile by themselves."""
    compiled = [(layer, layer.forward) for layer in model.modules() if "uncompiled_forward" in vars(layer)]
    try:
        for layer, _ in compiled:
            layer.forward = vars(layer)["uncompiled_forward"]
        yield
    finally:
        for layer, forward in compiled:
            layer.forward = forward


def working_backend() -> str:
    """Return the chosen backend, or aot_eager, which needs no compiler, if inductor finds none."""
    return "aot_eager" if missing_compiler(_device()) else chosen_backend()


def _keep_no_random_state() -> None:
    """Make torch compile recomputed layers without a state of random numbers, which no layer draws from.

    Attention counts as random because it can have dropout. torch 2.13 appends the state after the meshes of
    DTensors, which it looks for at the end, and fails (`functionalize_rng_ops` in the partitioner).
    """
    partitioners.has_recomputable_rng_ops = lambda fx_g: False


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _wait(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Wait for a tensor-parallel embedding's output by a copy, which is a plain tensor.

    Compiled code would take the tensor inside the unfinished sum without its history (torch 2.13; earlier
    versions fail in other ways), so no gradient would reach the embedding.
    """
    first, *others = inputs
    return (first.clone() if isinstance(first, AsyncCollectiveTensor) else first, *others)
