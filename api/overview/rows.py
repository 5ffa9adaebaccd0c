"""Makes the rows of an overview: from what tenants, adapters and sessions do, and from their names.

Owns nothing. Builds only the rows of the page that a view asks for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from graftwork.api.overview.directory import Names
from graftwork.api.overview.views import Sort, View, order_of
from graftwork.platform.activity.meter import TIERS, Activity, ActivityMeter, SessionActivity
from graftwork.platform.activity.windows import WindowCounts
from graftwork.platform.answers import overview as answers
from graftwork.platform.ids import SessionId, TenantId

LIVE_S = 900.0
"""A session without a running turn is shown for so many seconds after its latest event."""


@dataclass(frozen=True, slots=True)
class Placement:
    """By digest of an adapter: which engines have it, on their device and in host memory."""

    device: Mapping[str, tuple[str, ...]]
    host: Mapping[str, tuple[str, ...]]


class RowMaker:
    """Makes the rows of one view at one time."""

    def __init__(self, view: View, meter: ActivityMeter, names: Names) -> None:
        self._view = view
        self._meter = meter
        self._names = names
        self._now = meter.clock.monotonic()
        self._none = Activity(WindowCounts(self._now))
        for one in (*meter.tenants.values(), *meter.adapters.values()):
            one.counts.advance(self._now)

    def totals(self, tenants: list[TenantId], adapters: int, sessions: int) -> answers.OverviewTotals:
        """Returns the sums over the tenants that the view shows, and the lengths of the lists."""
        found = [self._meter.tenants[one] for one in tenants if one in self._meter.tenants]

        def rate(what: str) -> float:
            return round(sum(one.per_second(what, self._now) for one in found), 2)

        return answers.OverviewTotals(
            tenants=len(tenants),
            adapters=adapters,
            sessions=sessions,
            running=sum(one.running for one in found),
            waiting=sum(one.waiting for one in found),
            requests_per_s=rate("requests"),
            prompt_tokens_per_s=rate("prompt"),
            generated_tokens_per_s=rate("generated"),
            refused_per_s=rate("refused"),
        )

    def tenant_ids(self) -> list[TenantId]:
        """Returns the tenants of the view in its order. Those without activity come last, the newest first."""
        names, view = self._names.tenants, self._view
        known = {**dict.fromkeys(self._meter.tenants), **dict.fromkeys(names)}
        shown = [one for one in known if view.tenant_id in (None, one)]
        shown = [one for one in shown if view.finds(one, names[one].name if one in names else None)]
        if view.sort is Sort.NAME:
            return sorted(shown, key=lambda one: (names[one].name.lower() if one in names else "~", one))
        order, activities = order_of(view.sort, self._meter), self._meter.tenants
        return sorted(shown, key=lambda one: order(activities[one]) if one in activities else -1.0, reverse=True)

    def tenants(self, tenant_ids: list[TenantId]) -> tuple[answers.TenantOverview, ...]:
        """Returns the rows of one page of the tenants."""
        page = tenant_ids[self._view.tenants : self._view.tenants + self._view.rows]
        computed = weights = 0.0
        if self._view.is_operator:
            for tenant_id, activity in self._meter.tenants.items():
                if activity.counts:
                    computed += _computed(activity)
                    weights += self._weight(tenant_id)
        return tuple(self._tenant(one, computed, weights) for one in page)

    def _tenant(self, tenant_id: TenantId, computed: float, weights: float) -> answers.TenantOverview:
        known, activity = self._names.tenants.get(tenant_id), self._meter.tenants.get(tenant_id, self._none)
        is_shared = self._view.is_operator and bool(activity.counts)
        return answers.TenantOverview(
            id=tenant_id,
            name=None if known is None else known.name,
            status=None if known is None else str(known.status),
            running=activity.running,
            waiting=activity.waiting,
            requests_per_s=round(activity.per_second("requests", self._now), 2),
            prompt_tokens_per_s=round(activity.per_second("prompt", self._now), 1),
            generated_tokens_per_s=round(activity.per_second("generated", self._now), 1),
            ttft_ms=_first_tokens(activity),
            inter_token_p99_ms=_ms(activity.between_tokens_s(0.99)),
            refusals=activity.by_name("refused"),
            failures=activity.by_name("failed"),
            weight=None if known is None else known.weight,
            fair_share=round(self._weight(tenant_id) / weights, 4) if is_shared and weights else None,
            service_share=round(_computed(activity) / computed, 4) if is_shared and computed else None,
            service_tiers=activity.by_name("tier_requests"),
            prompt_tokens_by_tier=activity.by_name("tier"),
            slo_burn=self._burn(activity),
            active_at=activity.active_at or None,
        )

    def _burn(self, activity: Activity) -> float | None:
        rate = self._meter.burn_rate(activity)
        return None if rate is None else round(rate, 2)

    def _weight(self, tenant_id: TenantId) -> float:
        known = self._names.tenants.get(tenant_id)
        return 0.0 if known is None else known.weight

    def adapter_keys(self) -> list[tuple[TenantId, str]]:
        """Returns the adapter versions of the view, the most active first."""
        view, activities = self._view, self._meter.adapters
        known = {**dict.fromkeys(activities), **dict.fromkeys(self._names.versions)}
        shown = [key for key in known if view.tenant_id in (None, key[0]) and view.finds(key[1], key[0])]
        if view.sort is Sort.NAME:
            return sorted(shown, key=lambda key: (key[1], key[0]))
        order = order_of(view.sort, self._meter)
        return sorted(shown, key=lambda key: order(activities[key]) if key in activities else -1.0, reverse=True)

    def adapters(self, keys: list[tuple[TenantId, str]], placement: Placement) -> tuple[answers.AdapterOverview, ...]:
        """Returns the rows of one page of the adapters."""
        page = keys[self._view.adapters : self._view.adapters + self._view.rows]
        return tuple(self._adapter(key, placement) for key in page)

    def _adapter(self, key: tuple[TenantId, str], placement: Placement) -> answers.AdapterOverview:
        known, activity = self._names.versions.get(key), self._meter.adapters.get(key, self._none)
        digest = "" if known is None else known.digest
        return answers.AdapterOverview(
            tenant_id=key[0],
            name=key[1] if known is None else known.name,
            version=None if known is None else known.version,
            device=placement.device.get(digest, ()) if self._view.is_operator else (),
            host=placement.host.get(digest, ()) if self._view.is_operator else (),
            residency="device" if digest in placement.device else "host" if digest in placement.host else "none",
            size_bytes=None if known is None else known.size_bytes,
            running=activity.running,
            waiting=activity.waiting,
            requests_per_s=round(activity.per_second("requests", self._now), 2),
            ttft_ms=_first_tokens(activity),
            active_at=activity.active_at or None,
        )

    def session_ids(self) -> list[SessionId]:
        """Returns the live sessions of the view, those with a running turn first, then the latest active."""
        view, since = self._view, self._meter.clock.now() - LIVE_S
        shown = [
            session_id
            for session_id, one in self._meter.sessions.items()
            if view.tenant_id in (None, one.tenant_id)
            and (one.running or one.waiting or one.active_at >= since)
            and view.finds(session_id, one.tenant_id, one.model)
        ]
        sessions = self._meter.sessions
        return sorted(shown, key=lambda one: (sessions[one].running, sessions[one].waiting, sessions[one].active_at))[
            ::-1
        ]

    def sessions(self, session_ids: list[SessionId]) -> tuple[answers.SessionOverview, ...]:
        """Returns the rows of one page of the sessions."""
        page = session_ids[self._view.sessions : self._view.sessions + self._view.rows]
        return tuple(_session(one, self._meter.sessions[one]) for one in page)


def _session(session_id: SessionId, one: SessionActivity) -> answers.SessionOverview:
    status: Literal["running", "waiting", "idle"] = "running" if one.running else "waiting" if one.waiting else "idle"
    return answers.SessionOverview(
        id=session_id,
        tenant_id=one.tenant_id,
        model=one.model,
        status=status,
        tokens=one.context_tokens,
        prompt_tokens_by_tier=dict(one.prompt_by_tier),
        miss_reason=one.miss_reason,
        turns=one.turns,
        active_at=one.active_at,
    )


def _computed(activity: Activity) -> int:
    """The tokens that the engines have computed for a tenant in the window."""
    return activity.counts.totals["tier", TIERS[-1]] + activity.counts.totals["generated"]


def _first_tokens(activity: Activity) -> answers.Percentiles:
    return answers.Percentiles(p50=_ms(activity.first_token_s(0.5)), p99=_ms(activity.first_token_s(0.99)))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)
