"""How well predictions order what was measured; no torch."""

import numpy as np

Column = np.ndarray


def agreeing_pairs(predicted: Column, measured: Column) -> tuple[float, int]:
    """(pairs in the same order less those in the opposite one, all pairs that differ in what was measured).

    Their ratio is Kendall's τ (1938, doi:10.2307/2332226): 1 where all are in the same order, -1 where none is.
    """
    first, second = np.triu_indices(len(measured), 1)
    true = np.sign(measured[first] - measured[second])
    return float((np.sign(predicted[first] - predicted[second]) * true).sum()), int((true != 0).sum())


def regret(predicted_rate: Column, measured_rate: Column) -> float:
    """What the choice of the highest predicted rate loses against the highest measured one, as a share of it."""
    return 1 - float(measured_rate[np.argmax(predicted_rate)] / measured_rate.max())
