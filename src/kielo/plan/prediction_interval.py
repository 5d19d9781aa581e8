"""Prediction interval: how far a prediction may be off, by the [interval] of a card; no torch."""

from collections.abc import Mapping

import numpy as np

Column = np.ndarray
SHARE = 0.8  # of new measurements that should be inside


def interval(seconds: Column, figures: Mapping[str, float]) -> tuple[Column, Column]:
    """Returns (low, high), between which `SHARE` of measured seconds are expected, by a card's [interval]."""
    return seconds * np.exp(figures["lower"]), seconds * np.exp(figures["upper"])
