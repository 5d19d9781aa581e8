"""Activation recomputation: what the backward needs is made again instead of kept (Chen et al. 2016,
arXiv:1604.06174).

`attention` recomputes what lies between queries, keys, values and the output: much memory, little arithmetic
(the selective recomputation of Korthikanti et al. 2022, arXiv:2205.05198). `operators` recomputes a layer but
for the outputs of the operators named in the recipe. `full` keeps a layer's input only. torch's checkpointing
does the work.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout

_ATTENTION_KERNELS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


def lay_recompute(model: nn.Module, layout: Layout) -> None:
    """Recompute in every n-th layer, in place. `forward` is replaced and no module added, so names stay as
    they are.
    """
    policy = layout.recompute
    if policy == "none":
        return
    saved = _operators(layout.recompute_saved_operators) if policy == "operators" else set()
    for number, layer in enumerate(model.layers.values()):
        if number % layout.recompute_every_layers:
            continue
        if policy == "attention":
            layer.attention.inner.__class__ = _recomputed(type(layer.attention.inner))
        elif policy == "full":
            _recompute(layer)
        else:
            _recompute(layer, context_fn=partial(create_selective_checkpoint_contexts, _keep(saved)))


def _recompute(module: nn.Module, **options: Any) -> None:
    # No dropout anywhere, so there is no random state to bring back.
    module.forward = partial(
        checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False, **options
    )


@cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """`kind`, computed again in the backward. A class, where a forward of each module's own would do
    uncompiled: compiled layers share their code only as long as their parts are of one kind.
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
    """The operators in torch.ops.aten of these names; attention is one word for all its kernels."""
    found = set()
    for name in names:
        if name == "scaled_dot_product_attention":
            found |= {
                getattr(torch.ops.aten, kernel)
                for kernel in _ATTENTION_KERNELS
                if hasattr(torch.ops.aten, kernel)
            }
        elif hasattr(torch.ops.aten, name):
            found.add(getattr(torch.ops.aten, name))
        else:
            raise KieloError(
                f"layout.recompute_saved_operators: torch.ops.aten has no {name!r}; what would work: mm, "
                "addmm, scaled_dot_product_attention, …"
            )
    return found
