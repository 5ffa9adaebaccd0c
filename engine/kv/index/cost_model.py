"""Decides how much of a cached prefix to load and how much to compute again.

Owns the estimated costs, in seconds. A load costs a fixed time and a time for each page. A prefill costs a fixed time,
a time for each token, and a time for each position that a token attends to. The engine measures its own device at start
(`fit_transfer`, `fit_prefill`) and corrects the estimates while it runs (CostTracker).

A token can only be computed after all tokens before it. So the first part of the missing tokens is loaded, and the rest
is computed.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import combinations, groupby

import numpy as np

from graftwork.engine.core.tiers import Tier

_MIN_SECONDS = 1e-9
"""The lower bound of every cost, in seconds. Without this bound, a fit to noise could make an operation look free."""

_GROWING_SHARE = 0.25
"""The least share of the longest measured prefill's time that grows with its tokens."""

_MAX_RATIO = 8.0
"""The largest factor between an observed and an expected time. A larger difference is limited to this factor."""


@dataclass(frozen=True, slots=True)
class TransferCost:
    """The estimated time to load pages from the host or the disk to the device: a fixed time, and a time for each page."""

    fixed_s: float
    page_s: float

    def seconds(self, num_pages: int) -> float:
        """Returns the estimated seconds to load `num_pages` pages; 0 for no pages."""
        return self.fixed_s + num_pages * self.page_s if num_pages > 0 else 0.0

    def scaled(self, factor: float) -> "TransferCost":
        """Returns a new TransferCost with all times multiplied by `factor`."""
        return TransferCost(self.fixed_s * factor, self.page_s * factor)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """The estimated time to compute the KV of prompt tokens on the device."""

    token_s: float
    attended_s: float
    """Seconds for each pair of a token and a position that the token attends to."""
    fixed_s: float

    def seconds(self, num_tokens: int, context_tokens: int) -> float:
        """Returns the estimated seconds to compute `num_tokens` tokens that follow `context_tokens` tokens; 0 for no
        tokens.
        """
        if num_tokens <= 0:
            return 0.0
        return self.token_s * num_tokens + self.attended_s * _attended(num_tokens, context_tokens) + self.fixed_s

    def scaled(self, factor: float) -> "PrefillCost":
        """Returns a new PrefillCost with all times multiplied by `factor`."""
        return PrefillCost(self.token_s * factor, self.attended_s * factor, self.fixed_s * factor)


@dataclass(frozen=True, slots=True)
class LoadCost:
    """The estimated times of the three ways to get KV onto the device: load it from the host or the disk, or compute
    it.
    """

    host: TransferCost
    disk: TransferCost
    prefill: PrefillCost

    def of_tier(self, tier: Tier) -> TransferCost:
        """Returns the cost of loading pages from `tier` to the device. The cost is zero if `tier` is the device."""
        return {Tier.DEVICE: TransferCost(0.0, 0.0), Tier.HOST: self.host, Tier.DISK: self.disk}[tier]

    def best_prefix(self, pages_by_tier: Sequence[Tier], total_tokens: int, page_tokens: int) -> int:
        """Returns how many pages of the cached prefix to load to the device. The tokens after these pages are computed.

        `pages_by_tier` is the nearest tier of each page of the cached prefix. `total_tokens` is the length of the
        prompt, including uncached tokens. Among equally fast choices, the smallest number is returned. Only the borders
        between tiers are tried. Within one tier, load time grows linearly, and the time saved per page rises, because
        later tokens attend to more positions. So the minimum of the total time is at a border.
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

    def saves(self, tiers: Sequence[Tier], total_tokens: int, cached_tokens: int) -> bool:
        """Returns whether to load pages from `tiers` is faster than to compute the first `cached_tokens` of `total_tokens`
        tokens again.
        """
        loading = self.host.seconds(tiers.count(Tier.HOST)) + self.disk.seconds(tiers.count(Tier.DISK))
        rest = self.prefill.seconds(total_tokens - cached_tokens, cached_tokens)
        return loading + rest < self.prefill.seconds(total_tokens, 0)


UNMEASURED = LoadCost(TransferCost(0.0, 1.0), TransferCost(0.0, 1.0), PrefillCost(1.0, 0.0, 0.0))
"""The costs of an engine that has not been measured and serves no requests yet."""


@dataclass(frozen=True, slots=True)
class TransferSample:
    """The measured time of one load of `num_pages` pages to the device."""

    num_pages: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """The measured time to compute `num_tokens` tokens that follow `context_tokens` tokens."""

    num_tokens: int
    context_tokens: int
    seconds: float


def fit_transfer(samples: Sequence[TransferSample]) -> TransferCost:
    """Returns the TransferCost whose predictions have the least relative error for the measured loads."""
    features = [[1.0, float(sample.num_pages)] for sample in samples]
    fixed_s, page_s = fit_costs(features, [sample.seconds for sample in samples])
    return TransferCost(fixed_s, max(page_s, _MIN_SECONDS))


def fit_prefill(samples: Sequence[PrefillSample]) -> PrefillCost:
    """Returns the PrefillCost whose predictions have the least relative error for the measured prefills.

    At least a quarter of the longest prefill's time is charged to its tokens. On a busy machine, noise can hide that
    time grows with tokens. A cost without growth would say that tokens are free, and no page would ever be loaded.
    """
    features = [
        [float(sample.num_tokens), _attended(sample.num_tokens, sample.context_tokens), 1.0] for sample in samples
    ]
    token_s, attended_s, fixed_s = fit_costs(features, [sample.seconds for sample in samples])
    longest = max(samples, key=lambda sample: sample.num_tokens)
    growing_s = attended_s * _attended(longest.num_tokens, longest.context_tokens)
    least_s = (_GROWING_SHARE * longest.seconds - growing_s) / longest.num_tokens
    if token_s < least_s:
        fixed_s = max(fixed_s - (least_s - token_s) * longest.num_tokens, 0.0)
        token_s = least_s
    return PrefillCost(max(token_s, _MIN_SECONDS), attended_s, fixed_s)


class CostTracker:
    """Owns the current estimates of load and prefill times, and corrects them by measured times.

    There are three costs: of loads from the host, of loads from the disk, and of prefill. A measurement multiplies all
    times of one cost by the same factor: the ratio of measured to expected time, to the power of `smoothing`. The ratio
    is limited to the range from 1/8 to 8, so that a single slow operation does not change the estimates too much.
    """

    def __init__(self, cost: LoadCost, smoothing: float = 0.1) -> None:
        self._cost = cost
        self._smoothing = smoothing

    @property
    def cost(self) -> LoadCost:
        """The current estimates of load and prefill times."""
        return self._cost

    def start_from(self, cost: LoadCost) -> None:
        """Replaces the current estimates with `cost`, which the engine measured at start."""
        self._cost = cost

    def observe_load(self, tier: Tier, num_pages: int, seconds: float) -> None:
        """Corrects the estimated load time of `tier` (the host or the disk).

        Loading `num_pages` pages from there to the device took `seconds`.
        """
        assert tier is not Tier.DEVICE, "what is on the device is not loaded"
        transfer = self._cost.of_tier(tier)
        if num_pages > 0:
            moved = transfer.scaled(self._factor(seconds, transfer.seconds(num_pages)))
            self._cost = replace(self._cost, host=moved) if tier is Tier.HOST else replace(self._cost, disk=moved)

    def observe_prefill(self, num_tokens: int, context_tokens: int, seconds: float) -> None:
        """Corrects the estimated prefill time. Computing `num_tokens` tokens after `context_tokens` tokens took
        `seconds`.
        """
        if num_tokens > 0:
            expected = self._cost.prefill.seconds(num_tokens, context_tokens)
            self._cost = replace(self._cost, prefill=self._cost.prefill.scaled(self._factor(seconds, expected)))

    def check_integrity(self) -> None:
        """Checks that all estimated times are finite and that none is negative."""
        cost = self._cost
        for part in (cost.host, cost.disk, cost.prefill):
            assert all(math.isfinite(seconds) and seconds >= 0.0 for seconds in astuple(part)), f"{part} is no cost"

    def _factor(self, seen_s: float, expected_s: float) -> float:
        ratio = max(seen_s, _MIN_SECONDS) / max(expected_s, _MIN_SECONDS)
        return float(min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO) ** self._smoothing)


def _attended(num_tokens: int, context_tokens: int) -> float:
    """Returns the number of pairs of a new token and a position that the token attends to.

    Each new token attends to the context and, on average, to half of the new tokens.
    """
    return num_tokens * (context_tokens + num_tokens / 2)


def fit_costs(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Returns a weight >= 0 for each feature, so that the weighted sums of the features predict `seconds` best.

    `features` has one row for each measurement. The best weights give the least squared relative error, so short
    measurements count as much as long ones. Tries every subset of features. This is exact, and cheap for two or three
    features.
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
