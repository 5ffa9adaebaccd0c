"""Refuses a request at once if its tenant has no place left for another answer: before any other work for it.

    @router.post("/chat/completions")
    @takes_places
    async def create_chat_completion(...)

A tenant that floods the server thus costs no read of the database, no parse of a body and no thread, and its refusals
stay fast. The check knows the tenant by a key that was right seconds ago (see `platform/tenancy/recent_keys.py`). For
other keys it does nothing.
Invariant: the place that a request takes here is its own until it ends, so a request that passes is not refused later,
unless it needs more places.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from fastapi import Request

from graftwork.api.deps.resources import resources_of
from graftwork.api.http.request import presented_key
from graftwork.platform.quotas.in_flight import HeldPlaces

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

IDEMPOTENCY_KEY = "idempotency-key"
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
