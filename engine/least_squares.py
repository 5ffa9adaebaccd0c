"""Fitting costs, which cannot be negative, to measured times."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np


def fit_costs(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """The non-negative weights of the features whose sums come nearest to the measured seconds, by relative error.

    Relative, because a short measurement says as much about the fixed part as a long one about the rest.
    Every choice of features that may have a weight at all is tried, which is exact and cheap for two or three.
    """
    assert features, "costs cannot be fitted to nothing"
    scale = 1.0 / np.maximum(np.asarray(seconds, dtype=np.float64), 1e-12)
    design = np.asarray(features, dtype=np.float64) * scale[:, None]  # [num_samples, num_features]
    target = np.asarray(seconds, dtype=np.float64) * scale
    num_features = design.shape[1]
    best, best_error = np.zeros(num_features), float(np.sum(target**2))
    for size in range(1, num_features + 1):
        for chosen in map(list, combinations(range(num_features), size)):
            found, *_ = np.linalg.lstsq(design[:, chosen], target, rcond=None)
            error = float(np.sum((design[:, chosen] @ found - target) ** 2))
            if bool(np.all(found >= 0.0)) and error < best_error:
                best, best_error = np.zeros(num_features), error
                best[chosen] = found
    return tuple(float(weight) for weight in best)
