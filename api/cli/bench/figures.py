"""Computes the figures of a measured phase from the chats that were sent in it.

Owns the definitions: percentiles, throughput, and Jain's index. Never sends anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from graftwork.api.cli.bench.load import Sent

WINDOW_S = 5.0
"""The length of the windows in which service is compared."""


def percentile(values: Sequence[float], fraction: float) -> float | None:
    """Returns the smallest value that at least `fraction` of all values do not exceed; None if there are no values."""
    ordered = sorted(values)
    return ordered[min(int(fraction * len(ordered)), len(ordered) - 1)] if ordered else None


def jain(values: Sequence[float]) -> float:
    """Returns Jain's index of fairness: 1 if all values are equal, 1/n if one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """What one tenant saw in a phase. Times are in seconds; a figure without samples is None."""

    tenant: str
    sent: int
    answered: int
    """To the end. What had no end when the phase ended counts only in `sent`."""
    refused: int
    """By status 429 or 503."""
    failed: int
    """Other errors, and broken connections."""
    ttft_p50: float | None
    """A chat that got no token before the phase ended counts with the time that it had waited by then."""
    ttft_p99: float | None
    itl_p99: float | None
    tokens_per_s: float
    latency_mean: float | None = None
    """The mean time of a chat to its end. A chat that the end of the phase cuts off does not count."""


@dataclass(frozen=True, slots=True)
class Window:
    """The chats that were sent from `start` to `end`, two times of one clock in seconds."""

    sent: Sequence[Sent]
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def tenant_figures(windows: Sequence[Window]) -> list[TenantFigures]:
    """Returns the figures of each tenant over all windows of a phase, in the order of their first chats."""
    names = dict.fromkeys(one.tenant for window in windows for one in window.sent)
    return [_of_tenant(name, windows) for name in names]


def _of_tenant(name: str, windows: Sequence[Window]) -> TenantFigures:
    own = [(one, window.end) for window in windows for one in window.sent if one.tenant == name]
    sent = [one for one, _ in own]
    ttft = [wait for one, end in own if (wait := _wait_for_token(one, end)) is not None]
    gaps = [after - before for one in sent for before, after in pairwise(one.token_times)]
    ended = [one for one in sent if one.ended_at is not None]
    answered, refused = (sum(one.status in codes for one in ended) for codes in ((200,), (429, 503)))
    return TenantFigures(
        tenant=name,
        sent=len(sent),
        answered=answered,
        refused=refused,
        failed=len(ended) - answered - refused,
        ttft_p50=percentile(ttft, 0.5),
        ttft_p99=percentile(ttft, 0.99),
        itl_p99=percentile(gaps, 0.99),
        tokens_per_s=sum(one.num_tokens for one in sent) / sum(window.seconds for window in windows),
        latency_mean=fmean(times) if (times := [at - one.sent_at for one in ended if (at := one.ended_at)]) else None,
    )


def _wait_for_token(one: Sent, end: float) -> float | None:
    """Returns the time to the first token, at least the wait until `end`; None for a chat that ended without one."""
    if one.ttft_s is None and one.ended_at is None:
        return max(end - one.sent_at, 0.0)
    return one.ttft_s


def tokens_within(sent: Sequence[Sent], start: float, end: float) -> int:
    """Returns how many pieces of answers arrived in [start, end)."""
    return sum(start <= at < end for one in sent for at in one.token_times)


def computed_within(sent: Sequence[Sent], start: float, end: float) -> float:
    """Returns how many tokens the server computed in [start, end): the pieces of answers, and the prompts whose first token
    came then. A chat that was cut off, so that the server did not count its prompt, has the mean prompt of its tenant.
    """
    counted: dict[str, list[int]] = {}
    for one in sent:
        if one.computed_tokens is not None:
            counted.setdefault(one.tenant, []).append(one.computed_tokens)
    prompts = 0.0
    for one in sent:
        if one.token_times and start <= one.token_times[0] < end:
            known = counted.get(one.tenant, [0]) if one.computed_tokens is None else [one.computed_tokens]
            prompts += sum(known) / len(known)
    return tokens_within(sent, start, end) + prompts


def contended_jain(sent: Sequence[Sent], start: float, end: float) -> float | None:
    """Returns the mean Jain's index of the weighted service of tenants that had a chat without a token all through a window.

    A tenant's service in a window is the tokens that it got, divided by its weight. A tenant counts only while it wants
    more than it gets. Windows with fewer than two such tenants do not count;
    None if no window does.
    """
    indices = []
    for number in range(int((end - start) / WINDOW_S + 1e-6)):
        low, high = start + number * WINDOW_S, start + (number + 1) * WINDOW_S
        names = {one.tenant for one in sent if _waits_through(sent, one.tenant, low, high)}
        if len(names) > 1:
            own = [[one for one in sent if one.tenant == name] for name in sorted(names)]
            indices.append(jain([tokens_within(some, low, high) / some[0].weight for some in own]))
    return sum(indices) / len(indices) if indices else None


def _waits_through(sent: Sequence[Sent], tenant: str, low: float, high: float) -> bool:
    """Returns whether at each moment of the window some chat of the tenant had no token yet."""
    reached = low
    waits = sorted(
        (one.sent_at, one.token_times[0] if one.token_times else one.ended_at or high)
        for one in sent
        if one.tenant == tenant and one.status in (200, None)
    )
    for start, end in waits:
        if start <= reached:
            reached = max(reached, end)
    return reached >= high
