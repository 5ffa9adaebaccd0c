"""Places requests at the engines of a fleet, and remembers which engine has which session.

    request ──► what it needs, what each engine has ──► placement.py ──► Attempt: an engine, and the estimate

Owns the engines of sessions. Never sends a request.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.requests import EngineRequest, SessionKey
from graftwork.engine.fleet.failover import MovableRequest
from graftwork.engine.fleet.members import Member, version_of
from graftwork.engine.fleet.membership import Membership
from graftwork.engine.fleet.placement import (
    DEFAULT_PREFILL_TOKEN_S,
    Candidate,
    Demand,
    PlacementPolicy,
    first_token_s,
)
from graftwork.engine.fleet.prefix_map import BlockKeys
from graftwork.platform.clock import Clock
from graftwork.platform.ids import IsolationDomain
from graftwork.platform.replicas.lease import ServedVersion

_MAX_SESSIONS = 100_000
"""The sessions whose engines are remembered. An older one is placed by its prefix."""

SessionId = tuple[IsolationDomain, SessionKey]


@dataclass(slots=True)
class Attempt:
    """A request at one engine. A hedge may replace the engine."""

    member: Member
    served: ServedVersion | None
    """What the engine serves; None if that is unknown now."""
    expected_s: float
    """The estimated seconds to the first token."""
    began_at: float
    """On the monotonic clock."""
    awaits_token: bool = True

    def follow(self, other: "Attempt") -> None:
        """Takes the engine of another attempt, which has the first token."""
        self.member, self.served = other.member, other.served
        self.expected_s, self.began_at = other.expected_s, other.began_at


class Placer:
    """Chooses engines by a policy."""

    def __init__(self, membership: Membership, policy: PlacementPolicy, clock: Clock) -> None:
        self._membership = membership
        self._policy = policy
        self._clock = clock
        self._sessions: OrderedDict[SessionId, tuple[str, int]] = OrderedDict()
        """By session, the replica that had its last request, and its generation."""

    def place(self, movable: MovableRequest, keys: BlockKeys, able: Sequence[Member]) -> Attempt:
        """Chooses one of `able`, which are not empty, and counts the request there: the caller must call its `leave`."""
        request = movable.request
        session_id = session_of(request)
        bound, generation = (None, 0) if session_id is None else self._sessions.get(session_id, (None, 0))
        able = [one for one in able if one.generation >= generation] or able  # no session goes back in an upgrade
        page_tokens = able[0].description.page_tokens if able[0].description is not None else 1
        num_tokens = len(request.prompt_token_ids) + len(movable.emitted)
        demand = Demand(
            num_tokens,
            pages_for(num_tokens, page_tokens),
            page_tokens,
            needs_adapter=bool(request.adapters),
            key=repr(session_id).encode() if session_id else request.domain,
        )
        candidates = [self._candidate(member, request, keys, bound) for member in able]
        chosen = self._policy.choose(demand, candidates)
        member = self._membership.members[chosen.replica_id]
        member.enter(max(num_tokens - chosen.cached_tokens, 1))
        self._membership.count(member.replica_id).requests += 1
        self._membership.prefixes.note(member.replica_id, keys.keys)
        served = None if member.description is None else version_of(member.description)
        return Attempt(member, served, first_token_s(demand, chosen), self._clock.monotonic())

    def bind(self, request: EngineRequest, member: Member) -> None:
        """Notes that an engine has the session of a request now."""
        session_id = session_of(request)
        if session_id is None:
            return
        self._sessions[session_id] = member.replica_id, member.generation
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def replica_of(self, session_id: SessionId) -> str | None:
        """Returns the replica that had a session's last request, if that is known."""
        return self._sessions.get(session_id, (None, 0))[0]

    def forget(self, session_id: SessionId) -> None:
        """Forgets a closed session."""
        self._sessions.pop(session_id, None)

    def _candidate(self, member: Member, request: EngineRequest, keys: BlockKeys, bound: str | None) -> Candidate:
        load, membership = member.load, self._membership
        return Candidate(
            member.replica_id,
            cached_tokens=membership.prefixes.cached_tokens(member.replica_id, keys.keys),
            queued_tokens=load.queued_tokens + member.sent_tokens,
            free_pages=load.free_pages,
            requests=load.running_requests + load.waiting_requests + member.sent_requests,
            has_adapters=set(request.adapter_digests) <= set(load.resident_adapters),
            adapter_load_s=load.adapter_load_s,
            prefill_token_s=load.prefill_token_s or DEFAULT_PREFILL_TOKEN_S,
            slowness=membership.speeds.slowness(member.replica_id),
            has_session=member.replica_id == bound,
        )


def session_of(request: EngineRequest) -> SessionId | None:
    """Returns the session of a request, as all gateways call it."""
    return None if request.session is None else (request.domain, request.session.session)
