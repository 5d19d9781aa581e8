"""Fit of all constants of `kielo/plan/efficiency.py` to published runs, and the interval; no torch.

The method is that of `kielo/plan/calibrate.py`. Every family weighs the same, whatever its rows.
"""

from collections.abc import Sequence

import numpy as np

from kielo.plan.calibrate import fit_drawn_to_priors
from kielo.plan.efficiency import CONSTANTS, Efficiency, members
from kielo.plan.planned_layout import SHARE
from kielo.plan.step_seconds import step_seconds
from kielo.plan.workload import Workload

Column = np.ndarray
# Correlation of the priors of one constant's members, by what they are. Of 0 to 0.9 the choice hardly matters
# to families left out; more than this makes runs that were seen worse (benchmarks/log, 2026-11-23).
_ALIKE = {"engine": 0.3, "architecture": 0.1}
_NOISE = 0.04  # of a family's figure: what the prior's spread is weighed against


def fit(work: Workload, seconds: Column, families: list[str], start: Efficiency | None = None) -> Efficiency:
    """Fits the constants that predict `seconds` [n] of `work`; `families` [n] names each row's group."""
    target = np.log(seconds)

    def errors(parameters: Column) -> Column:
        return np.log(step_seconds(work, _unflat(parameters)).total) - target

    mean, weights = _flat(Efficiency.start()), family_weights(families) / _NOISE
    begin = _flat(start) if start else mean
    return _unflat(fit_drawn_to_priors(errors, weights, mean, _covariance(), begin, _depends(work)))


def spread(log_errors: Column, families: Sequence[str], share: float = SHARE) -> dict[str, float]:
    """Returns the card's [interval] from families that the fit had not seen, which holds `share` of them.

    It has quantiles of the logarithm of measured by predicted seconds, with each family's weight as in the
    fit.
    """
    order = np.argsort(log_errors)
    weights = family_weights(list(families))[order] ** 2
    reached = (np.cumsum(weights) - weights / 2) / weights.sum()
    tail = (1 - share) / 2
    return {
        "lower": float(np.interp(tail, reached, log_errors[order])),
        "upper": float(np.interp(1 - tail, reached, log_errors[order])),
    }


def family_weights(families: list[str]) -> Column:
    """Returns square roots of weights: a family's weights add up to the fourth root of its rows."""
    counts = {family: families.count(family) for family in set(families)}
    return np.array([(counts[family] ** 0.25 / counts[family]) ** 0.5 for family in families])


def _flat(efficiency: Efficiency) -> Column:
    return np.log(np.concatenate([efficiency.values[name] for name in CONSTANTS]))


def _depends(work: Workload) -> Column:
    """Returns True for each constant's members [n, k] of a run: one architecture's and one engine's alone."""
    columns = []
    for name, constant in CONSTANTS.items():
        of = np.zeros(len(work)) if constant.by == "all" else getattr(work, constant.by)
        columns.append(of[:, None] == np.arange(len(members(name))))
    return np.concatenate(columns, axis=1)


def _unflat(parameters: Column) -> Efficiency:
    values, at = {}, 0
    for name in CONSTANTS:
        count = len(members(name))
        values[name] = np.exp(parameters[at : at + count])
        at += count
    return Efficiency(values)


def _covariance() -> Column:
    """Returns the prior covariance [k, k] of the logarithms of all constants.

    Members of a constant share a part of their prior variance (partial pooling): what the runs tell of one
    moves the others too, and a member of few runs stays near them. A processor is unlike the others.
    """
    blocks = []
    for name, constant in CONSTANTS.items():
        is_gpu = np.array([member != "cpu" for member in members(name)])
        correlation = np.outer(is_gpu, is_gpu) * _ALIKE.get(constant.by, 0.0)
        np.fill_diagonal(correlation, 1.0)
        blocks.append(constant.spread**2 * correlation)
    covariance, at = np.zeros((sum(map(len, blocks)),) * 2), 0
    for block in blocks:
        covariance[at : at + len(block), at : at + len(block)] = block
        at += len(block)
    return covariance
