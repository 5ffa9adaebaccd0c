"""Reads from the members of a fleet what the autoscaler wants to know.

Owns the last report of each engine, for figures that are differences of two. Never decides anything.
"""

from collections.abc import Iterable

from graftwork.engine.core.load import EngineLoad
from graftwork.engine.fleet.autoscaler import EngineSignals, FleetSignals
from graftwork.engine.fleet.members import Member
from graftwork.engine.fleet.placement import DEFAULT_COSTS, DEFAULT_PREFILL_TOKEN_S, Candidate, Demand, first_token_s

_ONE_TOKEN = Demand(prompt_tokens=1, pages=1)
"""A request of one token: its estimate is what all other work at an engine costs it."""


def expected_first_token_s(member: Member, slowness: float = 1.0) -> float:
    """Estimates the seconds until the first token of a request of one token, if it were sent to this engine now.

    slowness: how many times slower than its peers the engine works.
    """
    load = member.load
    engine = Candidate(
        member.replica_id,
        queued_tokens=load.queued_tokens + member.sent_tokens,
        free_pages=load.free_pages,
        prefill_token_s=load.prefill_token_s or DEFAULT_PREFILL_TOKEN_S,
        slowness=slowness,
    )
    return first_token_s(_ONE_TOKEN, engine)


class SignalReader:
    """Turns reports of engines into signals. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._former: dict[str, tuple[float, EngineLoad]] = {}

    def read(self, now: float, members: Iterable[Member], waiting_requests: int = 0) -> FleetSignals:
        """Returns the signals of the engines that are ready. `waiting_requests` wait at the gateway for any engine."""
        ready = [member for member in members if member.is_ready]
        signals = tuple(self._signals(now, member) for member in ready)
        self._former = {member.replica_id: (now, member.load) for member in ready}
        return FleetSignals(signals, waiting_requests)

    def _signals(self, now: float, member: Member) -> EngineSignals:
        load, pages = member.load, 0 if member.description is None else member.description.device_pages
        token_s = load.prefill_token_s or DEFAULT_PREFILL_TOKEN_S
        return EngineSignals(
            queued_s=(load.queued_tokens + member.sent_tokens) * token_s,
            kv_use=max(1.0 - load.free_pages / pages, 0.0) if pages else 0.0,
            adapter_load_share=self._adapter_load_share(now, member),
            first_token_s=expected_first_token_s(member),
            requests=max(
                load.running_requests + load.waiting_requests + member.sent_requests, self._has_worked(member)
            ),
        )

    def _has_worked(self, member: Member) -> bool:
        """Returns whether the engine has made steps since the last look: a short request may come and go between two."""
        _, former = self._former.get(member.replica_id, (0.0, member.load))
        return member.load.steps > former.steps

    def _adapter_load_share(self, now: float, member: Member) -> float:
        since, former = self._former.get(member.replica_id, (now, member.load))
        loads = member.load.adapter_loads - former.adapter_loads
        if now <= since or loads <= 0:  # no time has passed, or the engine has started again
            return 0.0
        load_s = member.load.adapter_load_s
        return loads * (DEFAULT_COSTS.adapter_load_s if load_s is None else load_s) / (now - since)
