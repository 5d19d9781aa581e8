"""How well predictions order what was measured; no torch."""

import math
from collections.abc import Iterable

import numpy as np

Column = np.ndarray


def agreeing_pairs(predicted: Column, measured: Column) -> tuple[float, int]:
    """(pairs in the same order less those in the opposite one, all pairs that differ in what was measured).

    Their ratio is Kendall's τ (1938, doi:10.2307/2332226): 1 where all are in the same order, -1 where none
    is.
    """
    first, second = np.triu_indices(len(measured), 1)
    true = np.sign(measured[first] - measured[second])
    return float((np.sign(predicted[first] - predicted[second]) * true).sum()), int((true != 0).sum())


def regret(predicted_rate: Column, measured_rate: Column) -> float:
    """What the choice of the highest predicted rate loses against the highest measured one, as a
    share of it.
    """
    return 1 - float(measured_rate[np.argmax(predicted_rate)] / measured_rate.max())


def expected_tau(groups: Iterable[Column], spread: float) -> float:
    """The τ that true rates would have with rates measured beside them, whose logarithms are `groups` and
    were measured with a standard deviation of `spread`: of a pair, how much more often it keeps its order
    than not if it was measured again.
    """
    kept = []
    for logs in groups:
        first, second = np.triu_indices(len(logs), 1)
        kept += [math.erf(abs(difference) / (2 * spread)) for difference in logs[first] - logs[second]]
    return float(np.mean(kept))
