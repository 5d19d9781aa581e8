"""Activation recomputation: the backward computes activations again (Chen et al. 2016, arXiv:1604.06174).

`none` computes nothing expensive twice (docs/layouts.md says what a layer then keeps). `attention` recomputes
inner attention, from queries, keys and values to its output: much memory, little arithmetic (the selective
recomputation of Korthikanti et al. 2022, arXiv:2205.05198). `norms` makes again what the layer's norms give,
and `activations` what the MLP's activation gives, each from inputs that are kept in any case, when a matrix
needs it for its gradient. These three can be joined. `operators` recomputes a layer except the outputs of the
operators named in the recipe. `full` keeps a layer's input only. torch's activation checkpointing does the
work, except for norms and activations of layers that are not compiled: there the matrix after them would keep
their output, so hooks of autograd recompute it.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kielo.models.blocks import blocked_attention
from kielo.models.blocks.decoder import Decoder
from kielo.models.blocks.mlp import NamedActivation
from kielo.models.blocks.norm import LayerNorm, RMSNorm
from kielo.parallel import lower_right_attention
from kielo.parallel.materialise import local
from kielo.parallel.projection import AccumulatingProjection, RowSplitLinear
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout

_ATTENTION_KERNELS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
# It is in compiled layers. Uncompiled, code that torch compiles by itself calls it.
_FLEX_ATTENTION = torch.ops.higher_order.flex_attention


def apply_recompute(model: Decoder, layout: Layout) -> None:
    """Recompute in every n-th layer. `forward` is replaced and no module added, so names do not change."""
    policy, parts = layout.recompute, layout.recomputed
    if not parts:
        return
    names = layout.recompute_saved_operators
    if layout.compile and layout.alibi_kernel == "bias":  # made again with its biases
        names = tuple(name for name in names if name != "scaled_dot_product_attention")
    saved = _operators(names) if policy == "operators" else set()
    layers: list[Any] = list(model.layers.values())
    for number, layer in enumerate(layers):
        if number % layout.recompute_every_layers:
            continue
        again = _made_again(layer, parts)
        if again and not layout.compile:
            _MadeAgain(layer, again)
        # Compiled code ignores hooks of autograd. It recomputes what a checkpoint contains, the output too.
        recomputed = [layer.attention.inner] if "attention" in parts else []
        recomputed += again if layout.compile else []
        for module in recomputed:
            kind: Any = type(module)  # mypy takes it for an instance, and asks how that is hashed
            # The other modules have no functions of autograd in compiled code.
            by_policy = bool(layout.compile) and module is layer.attention.inner
            module.__class__ = _recomputed(kind, by_policy)
        if policy not in ("operators", "full"):
            continue
        for module in layer.modules():
            if isinstance(module, AccumulatingProjection):
                module.keeps_whole = True  # for one layer's backward only
            if isinstance(module, RowSplitLinear):
                module.is_one_operator = policy == "operators"
        by_policy = policy == "operators" or bool(layout.compile)
        options = _checkpoint_options(frozenset(saved), by_policy=by_policy)
        layer.forward = partial(checkpoint, layer.forward, **options)


def _checkpoint_options(saved: frozenset[Any] = frozenset(), *, by_policy: bool) -> dict[str, Any]:
    """Return the options of torch's checkpoint, which saves the results of the operators `saved`.

    by_policy: True if compiled code can contain functions of autograd, because before torch 2.13 their
    operators are recomputed by a policy only.
    """
    # Dropout follows from the layer's inputs, so no state of random numbers has to be restored.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if by_policy:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep(saved))
    return options


def _made_again(layer: nn.Module, parts: frozenset[str]) -> list[nn.Module]:
    """Return the modules of a layer that "norms" and "activations" of `parts` name."""
    norms: list[nn.Module] = [
        module for module in layer.children() if isinstance(module, RMSNorm | LayerNorm)
    ]
    # A function whose gradient follows from its result keeps it.
    activations: list[nn.Module] = [
        module
        for module in layer.modules()
        if isinstance(module, NamedActivation) and not module.keeps_result
    ]
    return norms * ("norms" in parts) + activations * ("activations" in parts)


class _MadeAgain:
    """Outputs of a layer's norms and of its activation, which autograd recomputes instead of keeping them.

    During the layer's forward it remembers them by their storage. If an operator saves one of these outputs
    for its backward, the function that makes it is saved in its place, with inputs that are kept in any case.
    """

    def __init__(self, layer: nn.Module, modules: list[nn.Module]) -> None:
        self._outputs: dict[int, tuple[Tensor, Callable[..., Tensor], tuple[Tensor, ...]]] = {}
        for module in modules:
            module.forward = partial(self._remember, module.forward)
        layer.forward = partial(self._run, layer.forward)

    def _run(self, forward: Callable[..., Tensor], *inputs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*inputs)
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                return forward(*inputs)
        finally:
            self._outputs.clear()

    def _remember(self, make: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        output = make(*inputs)
        if torch.is_grad_enabled():
            # With the output itself, so that no other tensor gets its storage meanwhile.
            detached = tuple(tensor.detach() for tensor in inputs)
            self._outputs[_storage(output)] = output, make, detached
        return output

    def _pack(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        found = self._outputs.get(_storage(tensor))
        if found is None:
            return tensor
        _, make, inputs = found
        part = local(tensor)
        size, stride, offset = part.size(), part.stride(), part.storage_offset()
        whole: dict[str, Any] = {}
        if isinstance(tensor, DTensor):  # as the row-split matrix takes its input
            whole = {"device_mesh": tensor.device_mesh, "placements": tensor.placements}
            whole |= {"shape": tensor.size(), "stride": tensor.stride()}

        @torch.no_grad()
        def again() -> Tensor:
            made = local(make(*inputs)).as_strided(size, stride, offset)
            return DTensor.from_local(made, run_check=False, **whole) if whole else made

        return again


def _unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


def _storage(tensor: Tensor) -> int:
    return local(tensor).untyped_storage()._cdata


@cache
def _recomputed(kind: type[nn.Module], by_policy: bool) -> type[nn.Module]:
    """Return a subclass of `kind` that the backward computes again: compiled layers share code by class."""
    options = _checkpoint_options(by_policy=by_policy)

    def forward(self: nn.Module, *inputs: Any) -> Any:
        def inside(*inputs: Any) -> Any:
            return kind.forward(self, *inputs)

        return checkpoint(inside, *inputs, **options)

    return type("Recomputed", (kind,), {"forward": forward})


def _keep(saved: frozenset[Any]) -> Callable[..., CheckpointPolicy]:
    def policy(_: Any, operator: Any, *args: Any, **keys: Any) -> CheckpointPolicy:
        is_saved = getattr(operator, "overloadpacket", operator) in saved
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _operators(names: tuple[str, ...]) -> set[Any]:
    """Return the operators of torch.ops.aten with these names: mm in FP8 too, all kernels of attention."""
    found = set()
    for name in names:
        if name == "mm":
            # Products in FP8 too, which torchao computes inside of a function of autograd, and of products
            # that tensor ranks share the sum.
            found |= {torch.ops.aten._scaled_mm, torch.ops.kielo.summed_product}
        if name == "scaled_dot_product_attention":
            found |= {
                getattr(torch.ops.aten, kernel)
                for kernel in _ATTENTION_KERNELS
                if hasattr(torch.ops.aten, kernel)
            }
            found |= {lower_right_attention.OPERATOR, blocked_attention.OPERATOR, _FLEX_ATTENTION}
        elif hasattr(torch.ops.aten, name):
            found.add(getattr(torch.ops.aten, name))
        else:
            raise KieloError(
                f"layout.recompute_saved_operators: torch.ops.aten has no {name!r}. Fix: mm, "
                "addmm, scaled_dot_product_attention, …"
            )
    return found
