"""Forecasts the first tokens of requests that may come next, so that gateways can refuse those that would come too late.

The thread that receives requests could say the same of each, but it shares the interpreter with the engine's loop, and a
refusal that needs no engine costs the engine nothing. What a forecast leaves open (short lines, a gateway's old news, long
prompts of which much may be cached), the engine decides.

Owns nothing. Reads a snapshot and the queue, on the loop's thread, a few times a second.
Invariant: a forecast is the estimate of arrival.py for a request like those that wait in its line. That of turns of sessions
is for a session that has nothing here yet, so it is no later than that of any session.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from graftwork.engine.core.deadlines import FirstTokenForecast, line_of
from graftwork.engine.scheduler.arrival import Arrival, QueueSnapshot, expected_first_token_s
from graftwork.engine.scheduler.order.request_state import RequestState

MAX_LINES = 16
"""The most lines that are forecast: three estimates of each take a part of a millisecond of the loop's time."""
_MORE = 4
"""So many further requests are assumed, to find what each of them adds."""
_NEW_SESSION = ("a session that has nothing here yet",)
"""A flow that no request has."""


def forecast_first_tokens(snapshot: QueueSnapshot, waiting: Iterable[RequestState]) -> tuple[FirstTokenForecast, ...]:
    """Returns a forecast of each line with waiting requests, of at most `MAX_LINES` with the most. `waiting` are all waiting
    requests.
    """
    lines: dict[str, list[RequestState]] = {}
    for state in waiting:
        if not state.has_run:
            lines.setdefault(line_of(state.request), []).append(state)
    longest = sorted(lines.items(), key=lambda item: -len(item[1]))[:MAX_LINES]
    found = (_forecast(snapshot, line, states) for line, states in longest)
    return tuple(one for one in found if one is not None)


def _forecast(snapshot: QueueSnapshot, line: str, states: list[RequestState]) -> FirstTokenForecast | None:
    """Returns the forecast of one line, from the estimates for a prompt of one token, for one of the mean length, and for
    one of the mean length behind further ones.
    """
    request = states[-1].request
    known = max(sum(state.num_prompt for state in states) // len(states), 2)
    uncached = max(math.ceil(known * snapshot.uncached_share(request)), 1)
    arrival = replace(Arrival.of(request, uncached), known_tokens=known)
    if request.session is not None:
        arrival = replace(arrival, flow=_NEW_SESSION)
    usual = expected_first_token_s(snapshot, arrival)
    shortest = expected_first_token_s(snapshot, replace(arrival, known_tokens=1, uncached_tokens=1))
    later = expected_first_token_s(snapshot, arrival, [arrival] * _MORE)
    if usual is None or shortest is None or later is None:
        return None
    token_s, request_s = (usual - shortest) / (known - 1), (later - usual) / _MORE
    return FirstTokenForecast(line, shortest, max(token_s, 0.0), max(request_s, 0.0))
