"""Knows what each tenant, adapter and session does on this gateway now, and how it fared in the last minutes.

    begin ──► admitted ──► tokens … ──► end      the life of one request, told by whoever generates it
    refuse                                       a request that was refused before it had a life

Owns the counts of this process. Never counts the requests of other gateways, and never stores anything: a gateway that
starts again begins with none. Use it in one event loop only.
Invariant: memory is bounded. At most `MAX_OWNERS` tenants, adapters and sessions are known; the longest idle one without
running requests goes first.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from graftwork.platform.activity.outcomes import Outcomes, VersionOutcomes
from graftwork.platform.activity.windows import WindowCounts, bucket_of, percentile
from graftwork.platform.clock import Clock
from graftwork.platform.ids import SessionId, TenantId
from graftwork.platform.objectives import Objective

MAX_OWNERS = 5000
_TOKENS_EACH_S = 0.5
"""The tokens of a stream are added to its tenant's counts so seldom, because that costs more than to sum them up."""
TIERS = ("device", "host", "disk", "recomputed")
"""Where the KV of prompt tokens came from."""


@dataclass(frozen=True, slots=True)
class RequestOwner:
    """Whose request it is."""

    tenant_id: TenantId
    adapter: str | None = None
    """The adapter version, such as `name@3`; None for the base model."""
    session_id: SessionId | None = None


@dataclass(slots=True)
class Activity:
    """What one tenant, adapter or session does now, and did in the last minutes."""

    counts: WindowCounts
    running: int = 0
    """Requests that the engine has admitted and not ended."""
    waiting: int = 0
    """Requests that the engine has not admitted yet."""
    active_at: float = 0.0
    """The unix time of the latest event."""

    def per_second(self, what: str, now: float) -> float:
        """Returns a rate: `requests`, `prompt` or `refused`, and of a tenant `generated`, in events or tokens a second."""
        return self.counts.per_second(what, now)

    def first_token_s(self, share: float) -> float | None:
        """Returns a percentile of the seconds to the first token."""
        return percentile(self.counts.of_kind("ttft"), share)

    def between_tokens_s(self, share: float) -> float | None:
        """Returns a percentile of the seconds between two tokens."""
        return percentile(self.counts.of_kind("itl"), share)

    def by_name(self, kind: str) -> dict[str, int]:
        """Returns the counts of the keys `(kind, name)` by name, such as refusals by error code."""
        return {str(name): count for name, count in self.counts.of_kind(kind).items()}


@dataclass(slots=True)
class SessionActivity:
    """What one session did last."""

    tenant_id: TenantId
    model: str | None
    running: int = 0
    waiting: int = 0
    context_tokens: int = 0
    """Tokens of the latest prompt, and of what was generated after it."""
    prompt_by_tier: Mapping[str, int] = field(default_factory=dict)
    """The tokens of the latest prompt by the cache tier that had their KV."""
    miss_reason: str | None = None
    turns: int = 0
    active_at: float = 0.0


Key = TypeVar("Key", bound=Hashable)
Known = TypeVar("Known", Activity, SessionActivity)


class _Table(Generic[Key, Known]):
    """The latest active owners of one kind, the longest idle one first."""

    def __init__(self) -> None:
        self.rows: OrderedDict[Key, Known] = OrderedDict()

    def put(self, key: Key, row: Known) -> None:
        self.rows[key] = row
        if len(self.rows) > MAX_OWNERS:
            idle = next((one for one, known in self.rows.items() if not known.running + known.waiting), None)
            if idle is not None:
                del self.rows[idle]

    def touch(self, key: Key) -> None:
        if key in self.rows:
            self.rows.move_to_end(key)


class ActivityMeter:
    """Counts what tenants, adapters and sessions do on this gateway."""

    def __init__(self, clock: Clock, objectives: Mapping[str, Objective] | None = None) -> None:
        """`objectives` are the service tiers' objectives, for the burn rates of tenants."""
        self.clock = clock
        self.outcomes = VersionOutcomes()
        """How the requests of watched adapter versions end."""
        self._objectives = objectives or {}
        self._tenants: _Table[TenantId, Activity] = _Table()
        self._adapters: _Table[tuple[TenantId, str], Activity] = _Table()
        self._sessions: _Table[SessionId, SessionActivity] = _Table()

    @property
    def tenants(self) -> Mapping[TenantId, Activity]:
        return self._tenants.rows

    @property
    def adapters(self) -> Mapping[tuple[TenantId, str], Activity]:
        """By tenant and adapter version, such as `name@3`."""
        return self._adapters.rows

    @property
    def sessions(self) -> Mapping[SessionId, SessionActivity]:
        return self._sessions.rows

    def begin(self, owner: RequestOwner, tier: str) -> "RequestWatch":
        """Records that a request goes to the engine. The caller must call `end` of the result."""
        parties = [self._tenant(owner.tenant_id)]
        if owner.adapter is not None:
            parties.append(self._adapter(owner.tenant_id, owner.adapter))
        session = None if owner.session_id is None else self._session(owner)
        outcomes = () if owner.adapter is None else self.outcomes.of((owner.tenant_id, owner.adapter))
        return RequestWatch(self, parties, session, tier, outcomes)

    def refuse(self, tenant_id: TenantId, code: str) -> None:
        """Records a request that was refused before it went to the engine. `code` is that of its error."""
        now, tenant = self.clock.monotonic(), self._tenant(tenant_id)
        tenant.counts.add("refused", now)
        tenant.counts.add(("refused", code), now)

    def forget_tenant(self, tenant_id: TenantId) -> None:
        """Forgets a tenant that was deleted, with its adapters and sessions."""
        self._tenants.rows.pop(tenant_id, None)
        for key in [key for key in self._adapters.rows if key[0] == tenant_id]:
            del self._adapters.rows[key]
        for session_id in [one for one, known in self._sessions.rows.items() if known.tenant_id == tenant_id]:
            del self._sessions.rows[session_id]

    def burn_rate(self, activity: Activity) -> float | None:
        """Returns how fast a tenant spends the error budget of its service tiers, over the window: the highest rate of
        all their objectives; see ObjectiveMeter. None without a counted request.
        """
        bad, good = activity.by_name("bad"), activity.by_name("good")
        rates = [
            bad.get(name, 0)
            / (bad.get(name, 0) + good.get(name, 0))
            / (1 - self._objectives[name.split(".")[0]].target)
            for name in {*bad, *good}
        ]
        return max(rates, default=None)

    def judge(self, activity: Activity, tier: str, kind: str, seconds: float, now: float) -> None:
        """Counts a request as good or bad under the objective of its tier. `kind` is `ttft` or `itl`."""
        objective = self._objectives.get(tier)
        limit = None if objective is None else objective.ttft_s if kind == "ttft" else objective.itl_s
        if limit is not None:
            activity.counts.add(("good" if seconds <= limit else "bad", f"{tier}.{kind}"), now)

    def note_success(self, activity: Activity, tier: str, now: float, *, failed: bool) -> None:
        """Counts the end of a request under the objective of its tier. `failed` says that the server was at fault."""
        if tier in self._objectives:
            activity.counts.add(("bad" if failed else "good", f"{tier}.success"), now)

    def _tenant(self, tenant_id: TenantId) -> Activity:
        return self._activity(self._tenants, tenant_id)

    def _adapter(self, tenant_id: TenantId, label: str) -> Activity:
        return self._activity(self._adapters, (tenant_id, label))

    def _activity(self, table: _Table[Key, Activity], key: Key) -> Activity:
        found = table.rows.get(key)
        if found is None:
            found = Activity(WindowCounts(self.clock.monotonic()))
            table.put(key, found)
        table.touch(key)
        found.active_at = self.clock.now()
        return found

    def _session(self, owner: RequestOwner) -> SessionActivity:
        assert owner.session_id is not None
        found = self._sessions.rows.get(owner.session_id)
        if found is None:
            found = SessionActivity(owner.tenant_id, owner.adapter)
            self._sessions.put(owner.session_id, found)
        self._sessions.touch(owner.session_id)
        found.model, found.active_at = owner.adapter, self.clock.now()
        return found


class RequestWatch:
    """Tells the meter what becomes of one request. Call `end` once, whatever happens."""

    __slots__ = (
        "_counted_until",
        "_is_admitted",
        "_is_over",
        "_itl",
        "_meter",
        "_num_tokens",
        "_outcomes",
        "_parties",
        "_session",
        "_tier",
    )

    def __init__(
        self,
        meter: ActivityMeter,
        parties: list[Activity],
        session: SessionActivity | None,
        tier: str,
        outcomes: tuple[Outcomes, ...] = (),
    ) -> None:
        self._meter = meter
        self._parties = parties
        self._session = session
        self._tier = tier
        self._outcomes = outcomes
        self._is_admitted = self._is_over = False
        self._num_tokens = 0
        """Tokens that the counts of the tenant do not have yet."""
        self._itl: dict[int, int] = {}
        """The same by bucket of the time between tokens, without the first tokens."""
        self._counted_until = 0.0
        for party in parties:
            party.waiting += 1
        if session is not None:
            session.waiting += 1

    def admitted(self, prompt_by_tier: Mapping[str, int], miss_reason: str | None = None) -> None:
        """Records that the request runs, and for how many tokens of its prompt the KV was on which tier."""
        now, self._is_admitted = self._meter.clock.monotonic(), True
        prompt_tokens = sum(prompt_by_tier.values())
        for party in self._parties:
            party.waiting, party.running = party.waiting - 1, party.running + 1
            party.counts.add("prompt", now, prompt_tokens)
            for tier, tokens in prompt_by_tier.items():
                if tokens:
                    party.counts.add(("tier", tier), now, tokens)
        if (session := self._session) is not None:
            session.waiting, session.running = session.waiting - 1, session.running + 1
            session.prompt_by_tier, session.miss_reason = dict(prompt_by_tier), miss_reason
            session.context_tokens, session.turns = prompt_tokens, session.turns + 1

    def first_tokens(self, num_tokens: int, seconds: float) -> None:
        """Records the first tokens of the answer, `seconds` after the request's arrival."""
        now = self._meter.clock.monotonic()
        for party in self._parties:
            party.counts.add(("ttft", bucket_of(seconds)), now)
        self._meter.judge(self._parties[0], self._tier, "ttft", seconds, now)
        for outcomes in self._outcomes:
            outcomes.note_first_token(seconds)
        self._num_tokens += num_tokens
        self._count_tokens(now)

    def tokens(self, num_tokens: int, seconds: float) -> None:
        """Records further tokens, which took `seconds` each. They are counted at most `_TOKENS_EACH_S` later."""
        bucket = bucket_of(seconds)
        self._itl[bucket] = self._itl.get(bucket, 0) + num_tokens
        self._num_tokens += num_tokens
        now = self._meter.clock.monotonic()
        if now - self._counted_until >= _TOKENS_EACH_S:
            self._count_tokens(now)

    def ended_well(self, mean_between_s: float | None) -> None:
        """Records that the answer is whole, and the mean seconds between its tokens; None for a single token."""
        now, tenant = self._meter.clock.monotonic(), self._parties[0]
        self._meter.note_success(tenant, self._tier, now, failed=False)
        if mean_between_s is not None:
            self._meter.judge(tenant, self._tier, "itl", mean_between_s, now)

    def failed(self, code: str, *, by_server: bool) -> None:
        """Records the error that ended the request. Before the prompt was admitted, it counts as a refusal."""
        now, tenant = self._meter.clock.monotonic(), self._parties[0]
        self._meter.note_success(tenant, self._tier, now, failed=by_server)
        if not self._is_admitted:
            tenant.counts.add("refused", now)
        tenant.counts.add(("failed" if self._is_admitted else "refused", code), now)
        for outcomes in self._outcomes:
            outcomes.note_failure(by_server=by_server)

    def end(self) -> None:
        """Records that the request is over. A second call changes nothing."""
        if self._is_over:
            return
        self._is_over = True
        now, unix = self._meter.clock.monotonic(), self._meter.clock.now()
        if self._num_tokens:
            self._count_tokens(now)
        for party in self._parties:
            party.counts.add("requests", now)
            party.counts.add(("tier_requests", self._tier), now)
            self._leave(party, unix)
        if self._session is not None:
            self._leave(self._session, unix)
        for outcomes in self._outcomes:
            outcomes.requests += 1

    def _leave(self, party: Activity | SessionActivity, unix: float) -> None:
        party.active_at = unix
        if self._is_admitted:
            party.running -= 1
        else:
            party.waiting -= 1

    def _count_tokens(self, now: float) -> None:
        counts = self._parties[0].counts
        counts.add("generated", now, self._num_tokens)
        for bucket, num_tokens in self._itl.items():
            counts.add(("itl", bucket), now, num_tokens)
        if self._session is not None:
            self._session.context_tokens += self._num_tokens
        self._num_tokens, self._counted_until = 0, now
        self._itl.clear()
