"""Robust least squares with priors, which fits a machine's figures to step times; no torch, no randomness.

Damped Gauss-Newton (Levenberg 1944, Marquardt 1963) on the logarithms of all figures. A measurement's
residual is the logarithm of predicted by measured seconds; its loss is pseudo-Huber beyond `_BEND`
(Charbonnier et al. 1997), so that a wrong row does not pull the fit. A figure is drawn to its prior by its
spread.
"""

from collections.abc import Callable

import numpy as np

Column = np.ndarray
_BEND = 0.08
_STEP = 1e-3


def fit_drawn_to_priors(
    errors: Callable[[Column], Column],
    weights: Column | float,
    mean: Column,
    spread: Column,
    start: Column,
    rounds: int,
    least_gain: float = 1e-4,
) -> Column:
    """Fits parameters [k], beginning at `start`.

    Minimises the squares of `errors` [n] (pseudo-Huber, times `weights`) and of the parameters' distance from
    `mean` by `spread`: standard deviations [k] or a covariance [k, k]. Stops after `rounds`, or when a round
    gains less than `least_gain` of what is left.
    """

    whiten = np.diag(1 / spread) if spread.ndim == 1 else np.linalg.inv(np.linalg.cholesky(spread))

    def residuals(parameters: Column) -> Column:
        found = errors(parameters)
        robust = np.sign(found) * _BEND * np.sqrt(2 * (np.sqrt(1 + (found / _BEND) ** 2) - 1))
        return np.concatenate([robust * weights, whiten @ (parameters - mean)])

    parameters, damping = start, 1e-2
    current = residuals(parameters)
    for _ in range(rounds):
        jacobian = np.stack(
            [
                (residuals(parameters + _STEP * direction) - current) / _STEP
                for direction in np.eye(len(parameters))
            ],
            axis=1,
        )
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
        if improved < least_gain * (current @ current):
            break
    return parameters
