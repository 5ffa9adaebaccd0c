"""Refuses requests in the gateway that the engine's queue has no room for, by what an engine says with its load.

Owns the latest word of one engine about the domains (usually tenants) that are near the bounds of its queue, and the number
of requests that this gateway has sent since. It is for one event loop.
Invariant: it refuses only what the engine would have refused a moment ago, behind the requests that were sent since. The queue
gets shorter meanwhile, so no word is believed for long.
"""

from collections.abc import Mapping

from graftwork.engine.core.load import EngineLoad, LoadReport
from graftwork.engine.core.queue_room import QueueRoom, too_many_of_yours
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.rpc.latest_load import LatestWord
from graftwork.platform.clock import Clock
from graftwork.platform.ids import IsolationDomain

_BELIEVED_S = 0.3
"""For so many seconds an engine's word is believed, from when it was so. While it works, the engine sends the next one after
a tenth of a second, or after a longer step.
"""


class QueueRooms:
    """Decides whether a request may go to one engine."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._latest = LatestWord(clock, _rooms_of, _BELIEVED_S)

    def note(self, report: LoadReport) -> None:
        """Takes a report that has just come. Reads it when a request asks."""
        self._latest.note(report)

    def check(self, domain: IsolationDomain, prompt_tokens: int = 1) -> None:
        """Raises CapacityContended, with the time to retry, if no request of this domain may wait, with a prompt of at least
        so many tokens.
        """
        name, now = domain.hex(), self._clock.monotonic()
        room = self._latest.by_key().get(name)
        if room is None:
            return
        sent = self._latest.sent.of(name, now)
        if sent.requests + 1 > room.requests_left or sent.tokens + prompt_tokens > room.tokens_left:
            raise too_many_of_yours(room.requests + sent.requests, room.tokens + sent.tokens, room.retry_after_s)

    def coming(self, domain: IsolationDomain) -> None:
        """Records that a request of this domain will be sent, if all is well when its prompt is read."""
        if domain.hex() in self._latest.by_key():
            self._latest.sent.expect(self._clock.monotonic(), domain.hex())

    def come(self, request: EngineRequest) -> None:
        """Records that a request that was coming is there."""
        self._latest.sent.come(request.domain.hex())

    def sent(self, request: EngineRequest) -> None:
        """Records that a request goes to the engine, which its latest word cannot know."""
        self._latest.sent.add(self._clock.monotonic(), request.domain.hex(), len(request.prompt_token_ids))

    def refused(self, request: EngineRequest) -> None:
        """Records that the engine has refused a request that was sent."""
        self._latest.sent.remove(request.domain.hex(), len(request.prompt_token_ids))


def _rooms_of(load: EngineLoad) -> Mapping[str, QueueRoom]:
    return {
        domain: QueueRoom(domain, requests, tokens, requests_left, tokens_left, retry_after_s)
        for domain, requests, tokens, requests_left, tokens_left, retry_after_s, *_ in load.rooms  # a later one may say more
    }
