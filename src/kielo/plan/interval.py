"""How far a prediction may be off: the spread of left-out families, from the card of fitted constants; no torch."""

from collections.abc import Mapping, Sequence

import numpy as np

from kielo.plan.fit import family_weights

Column = np.ndarray
SHARE = 0.8  # of new measurements that should lie inside


def spread(log_errors: Column, families: Sequence[str]) -> dict[str, float]:
    """The card's [interval]: quantiles of the logarithm of measured by predicted seconds, of families that the fit had not
    seen, each family weighing as in the fit.
    """
    order = np.argsort(log_errors)
    weights = family_weights(list(families))[order] ** 2
    reached = (np.cumsum(weights) - weights / 2) / weights.sum()
    tail = (1 - SHARE) / 2
    return {
        "lower": float(np.interp(tail, reached, log_errors[order])),
        "upper": float(np.interp(1 - tail, reached, log_errors[order])),
    }


def interval(seconds: Column, figures: Mapping[str, float]) -> tuple[Column, Column]:
    """(low, high): `SHARE` of measured seconds are expected between them. `figures` are a card's [interval]."""
    return seconds * np.exp(figures["lower"]), seconds * np.exp(figures["upper"])
