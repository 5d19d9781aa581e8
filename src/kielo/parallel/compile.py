"""Compilation of each layer by torch.compile."""

from torch import nn


def lay_compile(model: nn.Module) -> None:
    """Compile each of `model.layers`, in place; names stay as they are."""
    for layer in model.layers.values():
        layer.compile()
