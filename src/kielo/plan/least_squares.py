"""Robust least squares with priors, which fits a machine's figures to step times; no torch, no randomness.

Damped Gauss-Newton (Levenberg 1944, Marquardt 1963) on the logarithms of all figures. A measurement's
residual is the logarithm of predicted by measured seconds; its loss is pseudo-Huber beyond `_BEND`
(Charbonnier et al. 1997), so that a wrong row does not pull the fit. A figure is drawn to its prior by its
spread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Column = np.ndarray
_BEND = 0.08
_STEP = 1e-3


@dataclass(frozen=True)
class Stop:
    """When a fit ends: after `rounds`, or when one gains less than `least_gain` of what is left."""

    rounds: int
    least_gain: float = 1e-4


@dataclass(frozen=True)
class Members:
    """Parameters that are moved at once for a slope, as no measurement depends on two of them.

    `at`: the first one's index; `count`: how many follow each other; `of`: [n] the one, counted from `at`,
    that each measurement depends on.
    """

    at: int
    count: int
    of: np.ndarray


def fit_drawn_to_priors(
    errors: Callable[[Column], Column],
    weights: Column | float,
    mean: Column,
    spread: Column,
    start: Column,
    stop: Stop,
    members: Sequence[Members] | None = None,
) -> Column:
    """Fits parameters [k], beginning at `start`.

    Minimises the squares of `errors` [n] (pseudo-Huber, times `weights`) and of the parameters' distance from
    `mean` by `spread`: standard deviations [k] or a covariance [k, k]. members: all parameters, in their
    order; without it, each is moved alone.
    """
    whiten = np.diag(1 / spread) if spread.ndim == 1 else np.linalg.inv(np.linalg.cholesky(spread))

    def measured(parameters: Column) -> Column:
        found = errors(parameters)
        robust = np.sign(found) * _BEND * np.sqrt(2 * (np.sqrt(1 + (found / _BEND) ** 2) - 1))
        return robust * weights

    def residuals(parameters: Column) -> Column:
        return np.concatenate([measured(parameters), whiten @ (parameters - mean)])

    parameters, damping = start, 1e-2
    current = residuals(parameters)
    for _ in range(stop.rounds):
        slopes = _slopes(measured, parameters, current[: -len(parameters)], members)
        jacobian = np.concatenate([slopes, whiten])
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ current
        improved = 0.0
        while damping < 1e6:
            move = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            trial = residuals(parameters + np.clip(move, -0.5, 0.5))
            improved = current @ current - trial @ trial
            if improved > 0:
                parameters, current, damping = parameters + np.clip(move, -0.5, 0.5), trial, damping / 5
                break
            damping *= 4
        if improved < stop.least_gain * (current @ current):
            break
    return parameters


def _slopes(
    measured: Callable[[Column], Column],
    parameters: Column,
    current: Column,
    members: Sequence[Members] | None,
) -> Column:
    """Computes slopes [n, k] of `measured` by forward differences from `current`, its values [n]."""
    n, k = len(current), len(parameters)
    slopes = np.zeros((n, k))
    alone = [Members(index, 1, np.zeros(n, int)) for index in range(k)] if members is None else members
    for some in alone:
        moved = parameters.copy()
        moved[some.at : some.at + some.count] += _STEP
        slopes[np.arange(n), some.at + some.of] = (measured(moved) - current) / _STEP
    return slopes
