"""Fits the constants of `efficiency.py` to measured step times; no torch, one thread, no randomness.

Damped Gauss-Newton (Levenberg 1944, Marquardt 1963) on the logarithms of all constants. A measurement's residual is the
logarithm of predicted by measured seconds, bent beyond `_BEND` so that a wrong row does not pull (pseudo-Huber, Charbonnier
et al. 1997); every family weighs the same, whatever its rows. A constant is drawn to its start by its spread, and to the
mean of its members half as loosely: what few rows tell stays near the others.
"""

from collections.abc import Callable

import numpy as np

from kielo.plan.efficiency import CONSTANTS, Efficiency, members
from kielo.plan.step_time import step_seconds
from kielo.plan.workload import Workload

Column = np.ndarray
_BEND = 0.08
_NOISE = 0.04  # of a family's figure: what the prior's spread is weighed against
_STEP = 1e-3


def fit(
    work: Workload, seconds: Column, families: list[str], start: Efficiency | None = None, rounds: int = 25
) -> Efficiency:
    """Constants that predict `seconds` [n] of `work`; `families` [n] names each row's group."""
    target = np.log(seconds)

    def errors(parameters: Column) -> Column:
        return np.log(step_seconds(work, _unflat(parameters)).total) - target

    mean, weights = _flat(Efficiency.start()), family_weights(families) / _NOISE
    return _unflat(drawn_to_prior(errors, weights, mean, _spreads(), _flat(start) if start else mean, rounds))


def drawn_to_prior(
    errors: Callable[[Column], Column],
    weights: Column | float,
    mean: Column,
    spread: Column,
    start: Column,
    rounds: int,
    least_gain: float = 1e-4,
) -> Column:
    """Parameters [k] from `start` on for which `errors` [n], bent and times `weights`, and the parameters' distance from
    `mean` by `spread`, are least in squares. Stops after `rounds`, or when a round gains less than `least_gain` of what is left.
    """

    def residuals(parameters: Column) -> Column:
        found = errors(parameters)
        bent = np.sign(found) * _BEND * np.sqrt(2 * (np.sqrt(1 + (found / _BEND) ** 2) - 1))
        return np.concatenate([bent * weights, (parameters - mean) / spread])

    parameters, damping = start, 1e-2
    current = residuals(parameters)
    for _ in range(rounds):
        jacobian = np.stack([
            (residuals(parameters + _STEP * direction) - current) / _STEP for direction in np.eye(len(parameters))
        ], axis=1)
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


def family_weights(families: list[str]) -> Column:
    """Square roots of weights: a family's sum to a figure that grows slowly with its rows (their fourth root)."""
    counts = {family: families.count(family) for family in set(families)}
    return np.array([(counts[family] ** 0.25 / counts[family]) ** 0.5 for family in families])


def _flat(efficiency: Efficiency) -> Column:
    return np.log(np.concatenate([efficiency.values[name] for name in CONSTANTS]))


def _unflat(parameters: Column) -> Efficiency:
    values, at = {}, 0
    for name in CONSTANTS:
        count = len(members(name))
        values[name] = np.exp(parameters[at : at + count])
        at += count
    return Efficiency(values)


def _spreads() -> Column:
    return np.concatenate([np.full(len(members(name)), constant.spread) for name, constant in CONSTANTS.items()])
