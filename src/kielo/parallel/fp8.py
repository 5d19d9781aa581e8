"""Matrix products in FP8, of the layers and of the head, by torchao."""

import logging
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from kielo.models import families
from kielo.models.blocks.decoder import Decoder
from kielo.models.parameter_shapes import style_of
from kielo.parallel.compile import uncompiled
from kielo.parallel.materialise import local
from kielo.parallel.mesh import Mesh
from kielo.parallel.pipeline_parallel import Stages
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Fp8
from kielo.resolve.fp8_matrices import is_kept

# The layers' matrix products in FP8 (Micikevicius et al. 2022, arXiv:2209.05433), by torchao's
# Float8Linear.
#
# Weights stay fp32 parameters of the same names: inputs, weights and output gradients are scaled and
# rounded to FP8 just before they are multiplied. Used of torchao.float8 (0.15 and later):
# `convert_to_float8_training`, `Float8LinearConfig` with `from_recipe_name`,
# `enable_fsdp_float8_all_gather` and `emulate`, and `precompute_float8_dynamic_scale_for_fsdp`.
#
# The shard of a weight that is gathered in FP8 is a tensor around a tensor; `materialise.local` returns the
# inner tensor. Its scale is the scale of the whole weight, over the shard and the tensor axis, and is valid
# only for the values that it was computed from: code that changes weights calls `scale_weights` before the
# next forward.


_FIRST_CAPABILITY = (8, 9)  # Ada and Hopper; torch multiplies scaled rows there too since 2.7
_AMD_ARCHITECTURES = ("gfx94", "gfx95", "gfx12")  # MI300, MI350, RDNA 4


def apply_fp8(model: Decoder, mesh: Mesh, fp8: Fp8) -> None:
    """Replace the layers' matrices, all but `fp8.kept_in_bf16`, by float8 linears, in place (model on meta).

    The loss multiplies the head by chunks, and asks `model.fp8_head` how: in bf16 if that is None. Raise
    KieloError if torchao is not installed.
    """
    float8 = import_float8()
    config = float8_config(fp8)
    chosen = {
        name: module
        for name, module in model.named_modules()
        if name.startswith("layers.") and type(module) is nn.Linear and not is_kept(name, fp8.kept_in_bf16)
    }
    gathered = {
        name for name, module in chosen.items() if _is_gathered_in_fp8(model, name, module, mesh, fp8)
    }
    _swap(float8, model, chosen.keys() - gathered, config)
    if gathered:
        _swap(float8, model, gathered, replace(config, enable_fsdp_float8_all_gather=True))
    # In a tuple they are not registered under a second name.
    model.fp8_linears = tuple(model.get_submodule(name) for name in chosen)
    model.fp8_head = fp8 if fp8.head else None


def float8_config(fp8: Fp8) -> Any:
    return replace(import_float8().Float8LinearConfig.from_recipe_name(fp8.scaling), emulate=fp8.emulate)


def import_float8() -> ModuleType:
    """Import torchao.float8. Raises KieloError if it is not installed."""
    # It warns of kernels for other machines, and of its own use of deprecated parts of torch.
    with _silenced("torchao", "torch.utils._pytree"):
        try:
            import torchao.float8
        except ImportError as error:
            raise KieloError(
                f"train.precision = \"fp8\" needs torchao ({error}). Fix: pip install 'kielo[fp8]'"
            ) from error
    return torchao.float8


def refuse_without_fp8(device: torch.device, fp8: Fp8) -> None:
    """Raise KieloError if `device` cannot multiply in FP8, unless FP8 is emulated."""
    if fp8.emulate or _has_fp8(device):
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"the {device.type.upper()}"
    raise KieloError(
        f'train.precision = "fp8": {name} does not multiply in FP8; NVIDIA GPUs do from compute capability '
        f"{'.'.join(map(str, _FIRST_CAPABILITY))} on (H100), AMD's from gfx942 on (MI300). Fix: "
        'train.precision = "bf16", or train.fp8.emulate = true, which rounds in the same way and works '
        "anywhere, slowly"
    )


def scale_weights(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in FP8, by one all-reduce for each axis.

    All ranks call it whenever weights have changed: after they are filled or restored, and after each
    optimiser step. Without such weights it does nothing.
    """
    linears = _fp8_linears(model)
    if not any(linear.config.enable_fsdp_float8_all_gather for linear in linears):
        return
    _reshard(model)  # torchao ignores weights that are whole
    # torch warns of the order of axes, but maxima over several axes are the same in any order.
    with _silenced("torch.distributed.tensor._redistribute"):
        import_float8().precompute_float8_dynamic_scale_for_fsdp(model)


@contextmanager
def in_bf16(model: nn.Module, mesh: Mesh) -> Iterator[None]:
    """Make forward and backward passes inside multiply in bf16, as nn.Linear does, with the same weights.

    The head's products do too. Use it to compare gradients of the same batch, not for training: compiled
    layers run uncompiled, and weights that FSDP gathers in FP8 are gathered again for each product. Enter and
    leave between steps.
    """
    linears = _fp8_linears(model)
    if not linears:
        yield
        return
    heads = [(part, part.fp8_head) for part in _parts(model)]
    _reshard(model)  # so that `linear.weight` is the shard
    try:
        for part, _ in heads:
            part.fp8_head = None
        for linear in linears:
            is_gathered_in_fp8 = linear.config.enable_fsdp_float8_all_gather
            linear.forward = partial(
                _multiply_wide, linear, linear.weight if is_gathered_in_fp8 else None, mesh
            )
        with uncompiled(model):
            yield
    finally:
        for part, head in heads:
            part.fp8_head = head
        for linear in linears:
            vars(linear).pop("forward", None)  # the class's forward is used again


def _swap(float8: ModuleType, model: nn.Module, names: Set[str], config: Any) -> None:
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in names)


def _multiply_wide(linear: nn.Linear, shard: Tensor | None, mesh: Mesh, x: Tensor) -> Tensor:
    weight = linear.weight
    if shard is not None:
        weight = _WideWeight.apply(weight, shard, mesh.of_parameters("shard"))
    return F.linear(x, weight, linear.bias)


class _WideWeight(torch.autograd.Function):
    """Gather a weight in its compute dtype, before it is rounded to FP8. The gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shard: Tensor, axis: DeviceMesh) -> Tensor:
        # evenly split, as the gathered one
        part = DTensor.from_local(local(shard).to(weight.dtype), axis, [Shard(0)], run_check=False)
        whole = part.full_tensor()
        if isinstance(weight, DTensor):  # split over the tensor axis
            whole = DTensor.from_local(whole, weight.device_mesh, weight.placements, run_check=False)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def _is_gathered_in_fp8(model: Decoder, name: str, module: nn.Linear, mesh: Mesh, fp8: Fp8) -> bool:
    """Return True if the weight is gathered in FP8: allowed, and its rows divide by the ranks.

    torchao pads no shards (pytorch/ao#3982).
    """
    if not fp8.gathered_in_fp8 or fp8.scaling != "tensorwise":
        return False
    rows = module.out_features
    plan = families.module(model.config.model_type, "tables").TENSOR_PARALLEL_PLAN
    if style_of(plan, name) == "column":
        rows //= mesh.of_parameters("tensor").size()
    return rows % mesh.of_parameters("shard").size() == 0


def _has_fp8(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(_AMD_ARCHITECTURES)
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


def _fp8_linears(model: nn.Module) -> list[Any]:
    """Return torchao's linears that `apply_fp8` made, of one model or of all stages of a rank."""
    return [linear for part in _parts(model) for linear in part.fp8_linears]


def _parts(model: nn.Module) -> Sequence[Decoder]:
    if isinstance(model, Stages):
        return model.decoders
    return [model] if isinstance(model, Decoder) else []


def _reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def _silenced(*loggers: str) -> Iterator[None]:
    before = [(logger, logger.disabled) for logger in map(logging.getLogger, loggers)]
    try:
        for logger, _ in before:
            logger.disabled = True
        yield
    finally:
        for logger, was_disabled in before:
            logger.disabled = was_disabled


# The head's products in FP8, by torchao's float8 as the layers' are; the loss multiplies them by chunks.


class Fp8Head:
    """Multiply hidden states [c, d] or gradients of logits [c, v] by the head's weight [v, d] in FP8.

    The weight is rounded once for all chunks of tokens. A scale is for a chunk, or for this rank's rows
    of the weight. The weight's own gradient is not computed here: it stays a wide product, because FP8
    products cannot be summed over the chunks in fp32 without another pass.
    """

    def __init__(self, weight_vd: Tensor, fp8: Fp8) -> None:
        self._float8 = import_float8()
        self._weight_vd, self._config = weight_vd, float8_config(fp8)
        self._roles = self._float8.float8_training_tensor.GemmInputRole
        # A linear of any size, for the settings of its products.
        linear = nn.Linear(16, 16, bias=False, device="meta")
        linear = self._float8.float8_linear.Float8Linear.from_float(linear, self._config)
        self._mm_config = linear.linear_mm_config

    def logits(self, hidden_cd: Tensor) -> Tensor:
        return torch.mm(
            self._rounded(hidden_cd, self._config.cast_config_input, self._roles.INPUT, -1), self._weight_dv
        )

    def hidden_gradient(self, logits_gradient_cv: Tensor) -> Tensor:
        cast = self._config.cast_config_grad_output
        return torch.mm(
            self._rounded(logits_gradient_cv, cast, self._roles.GRAD_OUTPUT, -1), self._backward_weight_vd
        )

    @cached_property
    def _weight_dv(self) -> Tensor:
        return self._rounded(self._weight_vd.t(), self._config.cast_config_weight, self._roles.WEIGHT, 0)

    @cached_property
    def _backward_weight_vd(self) -> Tensor:
        # FP8 units take the second factor by columns.
        by_columns = self._weight_vd.t().contiguous()
        cast = self._config.cast_config_weight_for_grad_input
        return self._rounded(by_columns, cast, self._roles.WEIGHT, -1).t()

    def _rounded(self, tensor: Tensor, cast: Any, role: Any, dim: int) -> Tensor:
        """Return `tensor` scaled and rounded to FP8. dim: the dim that a row's scale is for."""
        scaling = self._float8.float8_scaling_utils
        return scaling.hp_tensor_to_float8_dynamic(
            tensor,
            cast.target_dtype,
            self._mm_config,
            gemm_input_role=role,
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=scaling.get_maybe_axiswise_dim(dim, cast.scaling_granularity),
            round_scales_to_power_of_2=self._config.round_scales_to_power_of_2,
        )
