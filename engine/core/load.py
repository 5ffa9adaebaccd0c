"""Defines what an engine reports about its load several times a second, so that gateways can place requests.

Owns the figures, and a report of them that is not decoded yet. Computes nothing: the engine loop fills them in, and engine/fleet and engine/rpc read them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from graftwork.engine.core.deadlines import FirstTokenForecast
from graftwork.engine.core.queue_room import QueueRoom


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of an engine at one moment. Any thread may read it."""

    epoch: int | None = None
    """The epoch of the engine; see EngineDescription."""
    running_requests: int = 0
    waiting_requests: int = 0
    queued_tokens: int = 0
    """Prompt tokens, of all requests that wait or run, that must still be computed."""
    free_pages: int = 0
    """Device pages that no running request holds: free ones, and cached ones that can be evicted. A page here has the KV
    of all layers, as in EngineDescription.device_pages.
    """
    steps: int = 0
    """The number of forward passes since the engine's start."""
    prefill_token_s: float | None = None
    """Seconds for each prompt token of a large step; None before the first step."""
    adapter_load_s: float | None = None
    """The usual seconds to read an adapter from its file; None before the first one."""
    resident_adapters: tuple[str, ...] = ()
    """Digests of the adapters on the device."""
    adapter_loads: int = 0
    """Adapters loaded to the device since the engine's start, because a request missed them."""
    forecasts: tuple[FirstTokenForecast, ...] = ()
    """Of the lines with most requests in the queue, while requests with deadlines come; empty otherwise."""
    rooms: tuple[QueueRoom, ...] = ()
    """What is left of the queue's bounds to the domains (usually tenants) that are near them; usually there are none."""
    age_s: float = 0.0
    """How long ago all this was so, in seconds, when it was sent."""


NO_LOAD = EngineLoad()


class LoadReport:
    """A load as an engine has sent it. It is decoded when it is first read, because most reports are replaced before.

    It is for one thread.
    """

    __slots__ = ("_decode", "_load")

    def __init__(self, decode: Callable[[], EngineLoad]) -> None:
        """`decode` returns the load. It raises Unavailable if nobody can read what the engine has sent."""
        self._decode = decode
        self._load: EngineLoad | None = None

    def read(self) -> EngineLoad:
        """Returns the load. Raises Unavailable if nobody can read what the engine has sent."""
        if self._load is None:
            self._load = self._decode()
        return self._load
