"""Defines what engines and gateways share about the deadlines of first tokens: forecasts, and the refusal.

Owns the error of a request whose deadline cannot be met, and the names of lines. Estimates nothing: engine/scheduler does,
for requests that have come (arrival.py) and for those that may come next (forecast.py).
"""

import math
from collections.abc import Sequence
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
UNSURE = 0.25
"""Who refuses a request before the engine loop has it only guesses what of its prompt is cached. If the guess is more than
this part of the deadline, the engine loop decides.
"""


class FirstTokenForecast(NamedTuple):
    """When a new request of one line would get its first token, in seconds from the moment of the load.

    A line is a part of the queue whose requests are served in turn: the requests of one tier, domain and session, or of one
    tier, domain and set of adapters.
    """

    line: str
    """As `line_of` names it."""
    wait_s: float
    """The time of a request with a prompt of one token."""
    token_s: float
    """What each token of a prompt adds, cached tokens included."""
    request_s: float
    """What each further request ahead in the line adds."""


def line_of(request: EngineRequest) -> str:
    """Returns the name of a request's line."""
    session = "" if request.session is None else request.session.session
    return line_name(request.tier, request.domain, request.adapters, session)


def line_name(tier: ServiceTier, domain: IsolationDomain, adapters: Sequence[AdapterUse], session: str = "") -> str:
    """Returns the name of the line of all requests with these. `session` is empty for requests outside sessions."""
    uses = ",".join(f"{use.digest}*{use.weight}" for use in adapters)
    return f"{tier} {domain.hex()} {uses} {session}"


def unreachable(deadline_s: float, estimate_s: float, alone_s: float = 0.0) -> GraftworkError:
    """Returns the error for a request whose first token would come after `estimate_s` seconds, or after `alone_s` if the
    engine had nothing else to do.
    """
    if alone_s > deadline_s:
        message = (
            f"The first token takes about {alone_s:.2f} s even on an idle engine, and the deadline is {deadline_s:.2f} s. "
            "Send a shorter prompt, or a longer x-deadline-ms."
        )
        return Unavailable(message, code=DEADLINE_UNREACHABLE)
    late_s = estimate_s - AIM * deadline_s
    message = (
        f"The first token would come in about {estimate_s:.2f} s, and the deadline is {deadline_s:.2f} s. Send the request "
        f"again in {math.ceil(late_s)} s, or with a longer x-deadline-ms."
    )
    return CapacityContended(message, code=DEADLINE_UNREACHABLE, retry_after_s=late_s)
