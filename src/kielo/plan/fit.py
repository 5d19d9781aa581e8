"""Fits the constants of `efficiency.py` to measured step times; no torch, one thread, no randomness.

Damped Gauss-Newton (Levenberg 1944, Marquardt 1963) on the logarithms of all constants. A measurement's residual is the
logarithm of predicted by measured seconds, bent beyond `_BEND` so that a wrong row does not pull (pseudo-Huber, Charbonnier
et al. 1997); every family weighs the same, whatever its rows. A constant is drawn to its start by its spread, and to the
mean of its members half as loosely: what few rows tell stays near the others.
"""

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
    weights = family_weights(families)
    origin = _flat(start or Efficiency.start())
    prior_mean, prior_spread = _flat(Efficiency.start()), _spreads()
    target = np.log(seconds)

    def residuals(parameters: Column) -> Column:
        errors = np.log(step_seconds(work, _unflat(parameters)).total) - target
        bent = np.sign(errors) * _BEND * np.sqrt(2 * (np.sqrt(1 + (errors / _BEND) ** 2) - 1))
        return np.concatenate([bent * weights / _NOISE, (parameters - prior_mean) / prior_spread])

    parameters, damping = origin, 1e-2
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
        if improved < 1e-4 * (current @ current):
            break
    return _unflat(parameters)


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
