"""What it costs to load pages and what it costs to compute them again, and so how many to load.

A load costs something for having to be done at all and something for each page; a prefill costs something for each
token, for each position that each token attends to, and once. The numbers are measured on the engine's own device at
start (`fit_transfer`, `fit_prefill`) and follow what is seen since (CostTracker).

Loading in order and computing the rest is one decision: since a later token can only be computed on what stands before
it, what is loaded is always the beginning of what is missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby

import numpy as np

from graftwork.engine.core.tiers import Tier

_SHORTEST_S = 1e-9
"""No cost is less: a fit to noise would otherwise call something free and do it without bounds."""


_MOST = 8.0
"""How many times more or less than expected one observation may say."""


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Bringing pages from one tier to the device."""

    fixed_s: float
    page_s: float

    def seconds(self, num_pages: int) -> float:
        """Nothing for no pages."""
        return self.fixed_s + num_pages * self.page_s if num_pages > 0 else 0.0

    def scaled(self, factor: float) -> "TransferCost":
        """All of it slower by a factor."""
        return TransferCost(self.fixed_s * factor, self.page_s * factor)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Computing tokens."""

    token_s: float
    attended_s: float
    """For each token and each position that it attends to."""
    fixed_s: float

    def seconds(self, num_tokens: int, context_tokens: int) -> float:
        """Of `num_tokens` behind `context_tokens` that are there already. Nothing for no tokens."""
        if num_tokens <= 0:
            return 0.0
        return self.token_s * num_tokens + self.attended_s * _attended(num_tokens, context_tokens) + self.fixed_s

    def scaled(self, factor: float) -> "PrefillCost":
        """All of it slower by a factor."""
        return PrefillCost(self.token_s * factor, self.attended_s * factor, self.fixed_s * factor)


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Estimated seconds of everything that can bring a prefix onto the device."""

    host: TransferCost
    disk: TransferCost
    prefill: PrefillCost

    def of_tier(self, tier: Tier) -> TransferCost:
        """What a load from a tier costs; from the device itself nothing."""
        return {Tier.DEVICE: TransferCost(0.0, 0.0), Tier.HOST: self.host, Tier.DISK: self.disk}[tier]

    def best_prefix(self, pages_by_tier: Sequence[Tier], total_tokens: int, page_tokens: int) -> int:
        """How many of the pages that are not on the device to load, from the first on; the rest is computed.

        `pages_by_tier` says where each page of the cached prefix lies, and `total_tokens` how long the prompt is,
        what is not cached anywhere included. Of equally fast ways the one that moves least is taken.

        Only the borders between tiers are tried: along pages of one tier the load grows by a straight line and the
        prefill falls ever faster, since early tokens attend to less, so the least is at one of the ends.
        """
        best, best_s = 0, float("inf")
        counts = dict.fromkeys(Tier, 0)
        runs = [(tier, len(list(run))) for tier, run in groupby(pages_by_tier)]
        for tier, num_pages in [*runs, (None, 0)]:
            if tier is not Tier.DEVICE:
                context = sum(counts.values()) * page_tokens
                loading = self.host.seconds(counts[Tier.HOST]) + self.disk.seconds(counts[Tier.DISK])
                seconds = loading + self.prefill.seconds(total_tokens - context, context)
                if seconds < best_s:
                    best, best_s = counts[Tier.HOST] + counts[Tier.DISK], seconds
            if tier is not None:
                counts[tier] += num_pages
        return best


UNMEASURED = LoadCost(TransferCost(0.0, 1.0), TransferCost(0.0, 1.0), PrefillCost(1.0, 0.0, 0.0))
"""Of an engine that has yet to be measured, and so serves nobody yet."""


@dataclass(frozen=True, slots=True)
class TransferSample:
    """One measured load."""

    num_pages: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One measured prefill of `num_tokens` behind `context_tokens`."""

    num_tokens: int
    context_tokens: int
    seconds: float


def fit_transfer(samples: Sequence[TransferSample]) -> TransferCost:
    """The cost that is nearest to what was measured, by relative error."""
    features = [[1.0, float(sample.num_pages)] for sample in samples]
    fixed_s, page_s = fit_costs(features, [sample.seconds for sample in samples])
    return TransferCost(fixed_s, max(page_s, _SHORTEST_S))


def fit_prefill(samples: Sequence[PrefillSample]) -> PrefillCost:
    """The cost that is nearest to what was measured, by relative error."""
    features = [
        [float(sample.num_tokens), _attended(sample.num_tokens, sample.context_tokens), 1.0] for sample in samples
    ]
    token_s, attended_s, fixed_s = fit_costs(features, [sample.seconds for sample in samples])
    return PrefillCost(max(token_s, _SHORTEST_S), attended_s, fixed_s)


class CostTracker:
    """The present estimate, which follows what is observed.

    Each observation moves the costs of its kind, all by one factor, a `smoothing` part of the way (of the logarithm)
    towards what was seen; a single one counts at most eightfold, so that one stall does not turn the engine around.
    """

    def __init__(self, cost: LoadCost, smoothing: float = 0.1) -> None:
        self._cost = cost
        self._smoothing = smoothing

    @property
    def cost(self) -> LoadCost:
        """What to decide by now."""
        return self._cost

    def start_from(self, cost: LoadCost) -> None:
        """Begin anew, from what was measured."""
        self._cost = cost

    def observe_load(self, tier: Tier, num_pages: int, seconds: float) -> None:
        """A load of some pages from the host or the disk took so long."""
        assert tier is not Tier.DEVICE, "what is on the device is not loaded"
        transfer = self._cost.of_tier(tier)
        if num_pages > 0:
            moved = transfer.scaled(self._factor(seconds, transfer.seconds(num_pages)))
            self._cost = replace(self._cost, host=moved) if tier is Tier.HOST else replace(self._cost, disk=moved)

    def observe_prefill(self, num_tokens: int, context_tokens: int, seconds: float) -> None:
        """A prefill of some tokens took so long."""
        if num_tokens > 0:
            expected = self._cost.prefill.seconds(num_tokens, context_tokens)
            self._cost = replace(self._cost, prefill=self._cost.prefill.scaled(self._factor(seconds, expected)))

    def _factor(self, seen_s: float, expected_s: float) -> float:
        ratio = max(seen_s, _SHORTEST_S) / max(expected_s, _SHORTEST_S)
        return float(min(max(ratio, 1 / _MOST), _MOST) ** self._smoothing)


def _attended(num_tokens: int, context_tokens: int) -> float:
    """Positions that all of some new tokens attend to: the context, and half of themselves on average."""
    return num_tokens * (context_tokens + num_tokens / 2)


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
