"""Refuses a request at once if its tenant has no place left for another answer: before any other work for it.

    @router.post("/chat/completions")
    @takes_places
    async def create_chat_completion(...)

A tenant that floods the server thus costs no read of the database, no parse of a body and no thread, and its refusals
stay fast. The check knows the tenant by a key that was right seconds ago (see `platform/tenancy/verified_keys.py`). For
other keys it does nothing.
Also reads the deadline of the first token, which the engine checks when the request arrives there.
Invariant: the place that a request takes here is its own until it ends, so a request that passes is not refused later,
unless it needs more places.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from fastapi import Request

from graftwork.api.deps.resources import resources_of
from graftwork.api.http.request import presented_key
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.quotas.in_flight import HeldPlaces

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

IDEMPOTENCY_KEY = "idempotency-key"
DEADLINE = "x-deadline-ms"
MAX_DEADLINE_MS = 3_600_000
_MARK = "_takes_places"


def takes_places(endpoint: Endpoint) -> Endpoint:
    """Marks a handler of which each request takes at least one place. Returns the same handler."""
    setattr(endpoint, _MARK, True)
    return endpoint


def first_place(endpoint: Callable[..., Any] | None, request: Request) -> AbstractContextManager[HeldPlaces | None]:
    """Takes the one place that each request for a marked handler needs, until the end of a `with` block. The handler
    takes the others, if it needs more, and may keep all of them beyond the block.

    Gives None for a handler without the mark, for a key that no request has used for ten seconds, and for a request
    with an `Idempotency-Key`, because its answer may be stored already. Raises CapacityContended if the tenant has no
    place left, and NotAuthenticated if the request has no key.
    """
    if not getattr(endpoint, _MARK, False) or IDEMPOTENCY_KEY in request.headers:
        return nullcontext()
    resources = resources_of(request)
    tenant_id = resources.server.gate.recent_tenant(presented_key(request))
    return nullcontext() if tenant_id is None else resources.inference.accounting.take_first_place(tenant_id)


def first_token_due_at(request: Request) -> float | None:
    """Returns the time, on the gateway's monotonic clock, by which the request's header `x-deadline-ms` wants the first
    token. Returns None without the header. Raises InvalidRequest if it is no whole number of milliseconds.

    The time counts from this call, which must come before the body is read.
    """
    text = request.headers.get(DEADLINE)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_DEADLINE_MS:
        message = f"{DEADLINE} is {text!r}: send whole milliseconds from 1 to {MAX_DEADLINE_MS}, or leave it out."
        raise InvalidRequest(message, param=DEADLINE)
    return resources_of(request).server.clock.monotonic() + int(text) / 1000
