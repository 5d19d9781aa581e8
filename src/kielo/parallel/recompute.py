"""Activation recomputation: the backward computes activations again (Chen et al. 2016, arXiv:1604.06174).

`attention` recomputes inner attention, from queries, keys and values to its output: much memory, little
arithmetic (the selective recomputation of Korthikanti et al. 2022, arXiv:2205.05198). `operators` recomputes
a layer except the outputs of the operators named in the recipe. `full` keeps a layer's input only. torch's
activation checkpointing does the work.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kielo.parallel import lower_right_attention
from kielo.parallel.projection import AccumulatingProjection
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout

_ATTENTION_KERNELS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


def apply_recompute(model: nn.Module, layout: Layout) -> None:
    """Recomputes in every n-th layer; `forward` is replaced and no module added, so names do not change."""
    policy = layout.recompute
    if policy == "none":
        return
    saved = _operators(layout.recompute_saved_operators) if policy == "operators" else set()
    for number, layer in enumerate(model.layers.values()):
        if number % layout.recompute_every_layers:
            continue
        if policy == "attention":
            layer.attention.inner.__class__ = _recomputed(type(layer.attention.inner))
            continue
        for module in layer.modules():
            if isinstance(module, AccumulatingProjection):
                module.keeps_whole = True  # for one layer's backward only
        if policy == "full":
            _recompute(layer)
        else:
            _recompute(layer, context_fn=partial(create_selective_checkpoint_contexts, _keep(saved)))


def _recompute(module: nn.Module, **options: Any) -> None:
    # There is no dropout, so no random state has to be restored.
    module.forward = partial(
        checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False, **options
    )


@cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns a subclass of `kind` that is computed again in the backward.

    It is a class, and not a forward replaced in each module, because compiled layers share their code only if
    their parts are of one class.
    """

    class Recomputed(kind):
        def forward(self, *inputs: Any) -> Any:
            def inside(*inputs: Any) -> Any:
                return kind.forward(self, *inputs)

            return checkpoint(inside, *inputs, use_reentrant=False, preserve_rng_state=False)

    return Recomputed


def _keep(saved: set[Any]) -> Callable[..., CheckpointPolicy]:
    def policy(_: Any, operator: Any, *args: Any, **keys: Any) -> CheckpointPolicy:
        is_saved = getattr(operator, "overloadpacket", operator) in saved
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _operators(names: tuple[str, ...]) -> set[Any]:
    """Returns the operators of torch.ops.aten with these names: mm in FP8 too, all kernels of attention."""
    found = set()
    for name in names:
        if name == "mm":  # products in FP8 too, which torchao computes inside of a function of autograd
            found.add(torch.ops.aten._scaled_mm)
        if name == "scaled_dot_product_attention":
            found |= {
                getattr(torch.ops.aten, kernel)
                for kernel in _ATTENTION_KERNELS
                if hasattr(torch.ops.aten, kernel)
            }
            found.add(lower_right_attention.OPERATOR)
        elif hasattr(torch.ops.aten, name):
            found.add(getattr(torch.ops.aten, name))
        else:
            raise KieloError(
                f"layout.recompute_saved_operators: torch.ops.aten has no {name!r}; what would work: mm, "
                "addmm, scaled_dot_product_attention, …"
            )
    return found
