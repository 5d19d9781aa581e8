"""The head's products in FP8, by torchao's float8 as the layers' are; the loss multiplies them by chunks."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kielo.parallel.fp8 import float8_config, import_float8
from kielo.recipe.sections import Fp8


class Fp8Head:
    """Multiplies by a head's weight [v, d] in FP8: hidden states [c, d], and gradients of logits [c, v].

    The weight is rounded once for all chunks of tokens. Scales are those of a chunk and of this rank's rows
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
        """Computes hidden states × weightᵀ [c, v]."""
        return torch.mm(
            self._rounded(hidden_cd, self._config.cast_config_input, self._roles.INPUT, -1), self._weight_dv
        )

    def hidden_gradient(self, logits_gradient_cv: Tensor) -> Tensor:
        """Computes the gradient of logits × weight [c, d]."""
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
        """Returns `tensor` scaled and rounded to FP8. dim: the one that a row's scale is for."""
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
