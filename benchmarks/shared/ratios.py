"""How sure a ratio is."""

import numpy as np

_BOOTSTRAP, _SEED = 10_000, 1


def interval(ratios: np.ndarray) -> list[float]:
    """Returns the 95 % bootstrap interval of the median (Efron 1979)."""
    chosen = np.random.default_rng(_SEED).integers(len(ratios), size=(_BOOTSTRAP, len(ratios)))
    return [float(bound) for bound in np.quantile(np.median(ratios[chosen], axis=1), (0.025, 0.975))]
