"""Measures of how well predictions order measurements; no torch."""

import math
from collections.abc import Iterable

import numpy as np

Column = np.ndarray


def agreeing_pairs(predicted: Column, measured: Column) -> tuple[float, int]:
    """Returns (agreeing pairs less opposite ones, all pairs with different measurements)."""
    first, second = np.triu_indices(len(measured), 1)
    true = np.sign(measured[first] - measured[second])
    return float((np.sign(predicted[first] - predicted[second]) * true).sum()), int((true != 0).sum())


def regret(predicted_rate: Column, measured_rate: Column) -> float:
    """Returns the loss of the highest predicted rate against the highest measured one, as a share of it."""
    return 1 - float(measured_rate[np.argmax(predicted_rate)] / measured_rate.max())


def expected_tau(groups: Iterable[Column], spread: float) -> float:
    """Returns the τ of true rates with measured ones.

    The logarithms of measured rates are `groups`, with a standard deviation of `spread`. A pair counts by how
    much more often it would keep its order than not, if it was measured again.
    """
    kept = []
    for logs in groups:
        first, second = np.triu_indices(len(logs), 1)
        kept += [math.erf(abs(difference) / (2 * spread)) for difference in logs[first] - logs[second]]
    return float(np.mean(kept))
