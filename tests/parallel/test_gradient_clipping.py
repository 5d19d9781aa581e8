"""The gradient norm and clipping on one process, by hand; how often a copy on other ranks counts."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kielo.parallel import gradient_clipping
from kielo.parallel.gradient_clipping import clip_gradients, gradient_norm


def mesh(size: int = 1, pipeline: int = 1) -> Any:
    axes = {"pipeline": pipeline, "shard": size // pipeline}
    parameters = SimpleNamespace(device_type="cpu", size=lambda: size, mesh_dim_names=tuple(axes))
    return SimpleNamespace(
        parameters=parameters, of_parameters=lambda axis: SimpleNamespace(size=lambda: axes[axis])
    )


def model(*gradients: list[float] | None) -> nn.Module:
    """Parameters with these gradients; the first is used twice."""
    parameters = nn.ParameterList()
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(len(gradient or [0.0])))
        parameter.grad = None if gradient is None else torch.tensor(gradient)
        parameters.append(parameter)
    parameters.tied = parameters[0]
    return parameters


def gradients(of: nn.Module) -> list[list[float]]:
    return [parameter.grad.tolist() for parameter in of.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("most", "factor"), [(6.0, 1.0), (5.0 + 1e-6, 1.0), (2.5, 0.5), (0.0, 0.0)]
)  # fmt: skip
def test_gradients_are_scaled_to_the_largest_norm(most: float, factor: float) -> None:
    """3, 4 and 0 have the norm 5; a tied parameter counts once, one without a gradient not at all."""
    made = model([3.0, 0.0], None, [-4.0])
    assert clip_gradients(made, mesh(), most).item() == pytest.approx(5.0)
    expected = [[3.0 * factor, 0.0], [-4.0 * factor]]
    assert gradients(made) == [pytest.approx(row, rel=1e-5) for row in expected]
    assert clip_gradients(model(None), mesh(), 1.0).item() == 0.0


@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_a_gradient_that_is_not_finite_makes_the_norm_so(value: float) -> None:
    norm = gradient_norm(model([1.0], [value]), mesh()).item()
    assert not math.isfinite(norm)


def test_what_several_ranks_hold_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks in two stages: four hold a plain parameter each, and squares are summed."""
    asked: list[Any] = []
    monkeypatch.setattr(gradient_clipping, "sum_over", lambda total, axes: asked.append(axes) or total * 4)
    assert gradient_norm(model([3.0], [4.0]), mesh(8, pipeline=2)).item() == pytest.approx(5.0)
    assert [axis.size() for axis in asked[0]] == [2, 4]


def test_small_gradients_are_scaled_as_torch_scales_them() -> None:
    """Where what is added to the norm counts: 1 / (5 + 1), in millionths."""
    made, theirs = (model([3e-6, 0.0], [-4e-6]) for _ in range(2))
    clip_gradients(made, mesh(), 1e-6)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1e-6)
    assert gradients(made) == [pytest.approx(row, rel=1e-6) for row in gradients(theirs)]
    assert gradients(made)[0][0] == pytest.approx(0.5e-6, rel=1e-5)
