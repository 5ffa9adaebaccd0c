"""Defines what engines and gateways share about the deadlines of first tokens: forecasts, and the refusal.

Owns the error of a request whose deadline cannot be met, and the names of lines. Estimates nothing: engine/scheduler does,
for requests that have come (arrival.py) and for those that may come next (forecast.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graftwork.engine.core.requests import AdapterUse, EngineRequest, ServiceTier
from graftwork.platform.errors import CapacityContended, GraftworkError, Unavailable
from graftwork.platform.ids import IsolationDomain

DEADLINE_UNREACHABLE = "deadline_unreachable"
"""The code of the error for a request that would get its first token after its deadline."""
AIM = 0.95
"""A request is let in if its first token is expected within this part of its deadline. The rest is for the way back through
the gateway to the client, and for what an estimate cannot know.
"""
GATEWAY_AIM = 0.9
"""The same for a gateway, which knows the queue as it was a moment ago. It is less, so that an engine has hardly any request
to refuse: a refusal there costs the gateway the whole request, and waits for the engine's interpreter.
"""
UNSURE = 0.25
"""Who refuses a request before the engine loop has it only guesses what of its prompt is cached. If the guess is more than
this part of the deadline, the engine loop decides.
"""


class FirstTokenForecast(NamedTuple):
    """When a new request of one line would get its first token, in seconds from the moment of the load.

    A line is a part of the queue whose requests are served in turn: the requests of one tier, domain and set of adapters. All
    turns of sessions of one tier and domain are in one line, too: a session has one turn at a time, so each of them is the
    first of its session, and what holds for a new session holds for all.
    """

    line: str
    """As `line_of` names it."""
    wait_s: float
    """The time of a request with a prompt of one token."""
    token_s: float
    """What each token of a prompt adds, cached tokens included."""
    request_s: float
    """What each further request ahead in the line adds."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What is known of a request before its prompt is read."""

    tier: ServiceTier
    domain: IsolationDomain
    adapters: Sequence[AdapterUse] = ()
    in_session: bool = False
    """Whether it is a turn of a session."""
    deadline_s: float | None = None
    """The seconds in which its first token must come; None sets no limit."""

    @property
    def line(self) -> str:
        """The name of its line."""
        if self.in_session:
            return f"{self.tier} {self.domain.hex()} sessions"
        uses = ",".join(f"{use.digest}*{use.weight}" for use in self.adapters)
        return f"{self.tier} {self.domain.hex()} {uses} "


def line_of(request: EngineRequest) -> str:
    """Returns the name of a request's line."""
    return Newcomer(request.tier, request.domain, request.adapters, request.session is not None).line


def unreachable(deadline_s: float, estimate_s: float, alone_s: float = 0.0, aim: float = AIM) -> GraftworkError:
    """Returns the error for a request whose first token would come after `estimate_s` seconds, or after `alone_s` if the
    engine had nothing else to do. It would be let in within the part `aim` of its deadline.
    """
    if alone_s > deadline_s:
        message = (
            f"The first token takes about {alone_s:.2f} s even on an idle engine, and the deadline is {deadline_s:.2f} s. "
            "Send a shorter prompt, or a longer x-deadline-ms."
        )
        return Unavailable(message, code=DEADLINE_UNREACHABLE)
    late_s = estimate_s - aim * deadline_s
    message = (
        f"The first token would come in about {estimate_s:.2f} s, and the deadline is {deadline_s:.2f} s. Send the request "
        f"again in {math.ceil(late_s)} s, or with a longer x-deadline-ms."
    )
    return CapacityContended(message, code=DEADLINE_UNREACHABLE, retry_after_s=late_s)
