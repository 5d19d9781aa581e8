"""How far a prediction may be off, by the [interval] of the card of fitted constants; no torch."""

from collections.abc import Mapping

import numpy as np

Column = np.ndarray
SHARE = 0.8  # of new measurements that should lie inside


def interval(seconds: Column, figures: Mapping[str, float]) -> tuple[Column, Column]:
    """(low, high): `SHARE` of measured seconds are expected between them. `figures` are a card's
    [interval].
    """
    return seconds * np.exp(figures["lower"]), seconds * np.exp(figures["upper"])
