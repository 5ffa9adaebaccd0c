"""Defines route classes that authenticate a request before they read its body, and implements `Idempotency-Key`.

`OpenAiRoute` and `NativeRoute` accept a tenant's key, and `AdminRoute` accepts the operator's key. Each also accepts the
web console's cookie for such a key. The status of an
invalid body is 400 on OpenAI-compatible routes, and 422 on all other routes.
A POST with an `Idempotency-Key` that arrives twice runs once, and both requests get the same answer. The server stores
only successful answers; a request that fails frees its idempotency key. Some work continues after its client leaves.
Such work is stored when it starts (`keep_begun`), so that a client that reconnects finds it again. Work that failed
through the server's fault is not given again: a repeated request runs anew.
Never authenticates by itself: the Authenticator does. Invariant: without a valid key, no handler runs and nothing
parses the body.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from graftwork.api.deps.admission import IDEMPOTENCY_KEY, first_place, first_token_due_at
from graftwork.api.deps.console_guard import refuse_forged
from graftwork.api.deps.direct_calls import Handler, direct_handler
from graftwork.api.deps.resources import resources_of
from graftwork.api.http.console_cookie import changes_state
from graftwork.api.http.request import BoundedRequest, JsonRequest, UploadRequest, client_address, presented_key
from graftwork.api.http.response_headers import REPLAYED
from graftwork.api.http.streaming import EventStream
from graftwork.api.http.validation import as_invalid_request, as_validation_failed, invalid_body
from graftwork.platform.errors import GraftworkError, InternalFailure, InvalidRequest, NotFound, ValidationFailed
from graftwork.platform.ids import SessionId, TurnId
from graftwork.platform.quotas.in_flight import HeldPlaces
from graftwork.platform.tenancy.idempotency import Attempt, IdempotencyStore, StoredReply, TurnClaim
from graftwork.platform.tenancy.principals import AdminPrincipal, Principal
from graftwork.platform.tracing.request_trace import Stage


@dataclass(frozen=True, slots=True)
class ReplayRules:
    """How the routes of one class store an answer, and how they send a stored answer again, for `Idempotency-Key`."""

    kept: Callable[[bytes], bytes]
    """Takes the body of an answer, and returns the part that the server may store, without secrets."""
    replay: Callable[[StoredReply], Awaitable[Response | None]]
    """Makes the response to a repeated request. None if the stored work failed through the server's fault."""
    begun_body: Callable[[SessionId, TurnId], bytes]
    """Makes the body that the server stores when the request starts a turn. The body identifies the turn."""


class IdempotencyClaim:
    """The idempotency key that one running request has reserved. Stores the request's answer, or frees the key.

    If the request starts a turn, the turn's transaction stores the turn as the answer. `keep_begun` makes this answer
    final.
    """

    def __init__(self, store: IdempotencyStore, attempt: Attempt, kept: Callable[[bytes], bytes]) -> None:
        self._store = store
        self._attempt = attempt
        self._kept = kept
        self._is_kept = False

    async def keep(self, status: int, body: bytes) -> None:
        if not self._is_kept:
            self._is_kept = True
            await self._store.complete(self._attempt, status, self._kept(body))

    def keep_begun(self) -> None:
        self._is_kept = True

    async def release(self) -> None:
        if not self._is_kept:
            await self._store.abandon(self._attempt)


def keep_begun(request: Request) -> None:
    """Makes the turn that this request has started its answer, also if the turn fails later.

    If the client sends the request again, the route's `replay` finds the turn. Does nothing for a request without an
    idempotency key.
    """
    claimed: IdempotencyClaim | None = getattr(request.state, "claimed_key", None)
    if claimed is not None:
        claimed.keep_begun()


async def answer_once(
    request: BoundedRequest,
    store: IdempotencyStore,
    owner: str,
    handle: Callable[[], Awaitable[Response]],
    replays: ReplayRules,
) -> Response:
    """Calls `handle` and returns its answer.

    If the server has already answered the same request, returns the stored answer instead, unless its work failed
    through the server's fault. Two requests are the same if they have the same `Idempotency-Key`, path and body, and
    API keys of the same `owner`.
    Raises Conflict if a different request used this idempotency key, or if the first request with this key still runs.
    """
    key = request.headers.get(IDEMPOTENCY_KEY)
    if key is None or request.method != "POST":
        return await handle()
    digest = await request.digest()
    while isinstance(claim := await store.begin(owner, key, digest), StoredReply):
        replayed = await replays.replay(claim)
        if replayed is not None:
            replayed.headers[REPLAYED] = "true"
            return replayed
        await store.forget(claim)
    request.state.claimed_key = claimed = IdempotencyClaim(store, claim, replays.kept)
    if isinstance(request.state.principal, Principal):
        turn_claim = TurnClaim(claim, replays.begun_body)
        request.state.principal = replace(request.state.principal, turn_claim=turn_claim)
    try:
        response = await handle()
        if not isinstance(response, EventStream):  # only `keep_begun` keeps a stream
            await claimed.keep(response.status_code, bytes(response.body))
        return response
    finally:
        await claimed.release()


class AuthenticatedRoute(APIRoute):
    """A route that authenticates each request before it reads the body.

    It also limits the size of the body, and converts FastAPI's errors to errors of Graftwork.
    """

    is_idempotent = True
    """Whether the route's POSTs support `Idempotency-Key`."""

    def get_route_handler(self) -> Handler:
        handle = direct_handler(self, super().get_route_handler())

        async def guarded(request: Request) -> Response:
            with first_place(self.endpoint, request) as place:
                request.state.principal = await self.authenticate(request)
                request.state.trace.mark(Stage.AUTHENTICATE)
                return await answer(request, place)

        async def answer(request: Request, place: HeldPlaces | None) -> Response:
            # This function deletes its variables for errors before it raises them. An error refers to this frame by its
            # traceback, so a variable would close a cycle that keeps the body in memory until the next collection.
            bounded = self.bounded(request)
            try:
                _refuse_null_characters(request)
                _note_sender(request, place)
                return await self.run(bounded, handle)
            except RequestValidationError as error:
                raise self.as_route_error(invalid_body(error)) from error
            except HTTPException as error:
                failure = self._body_error(error)
                error.__traceback__ = failure.__traceback__ = None  # FastAPI's frame holds the body and the error
                try:
                    raise failure from error
                finally:
                    del failure
            except (InvalidRequest, ValidationFailed) as error:
                failure = self.as_route_error(error)
                try:
                    if failure is error:
                        raise
                    raise failure from error
                finally:
                    del failure

        return guarded

    def bounded(self, request: Request) -> BoundedRequest:
        """Returns the same request with the limits for the bodies of this class."""
        parse = resources_of(request).server.json.parse
        return JsonRequest(request.scope, request.receive, partial(parse, _owner(request)))

    async def authenticate(self, request: Request) -> Principal | AdminPrincipal:
        """Returns the principal that owns the request's key. Raises NotAuthenticated without a valid key.

        Raises NotPermitted for an operator's key on a tenant's route, and for a tenant's key on an operator's route.
        """
        raise NotImplementedError

    async def run(self, request: BoundedRequest, handle: Handler) -> Response:
        """Runs the handler and returns its answer.

        If the server has already answered a request with this `Idempotency-Key`, returns the stored answer instead.
        """
        if not self.is_idempotent:
            return await handle(request)
        store = resources_of(request).server.idempotency
        replays = ReplayRules(self.storable_body, lambda reply: self.replay(request, reply), self.begun_body)
        return await answer_once(request, store, _owner(request), lambda: handle(request), replays)

    def storable_body(self, body: bytes) -> bytes:
        """Takes the body of an answer, and returns the part that the server may store for `Idempotency-Key`."""
        return body

    def begun_body(self, session_id: SessionId, turn_id: TurnId) -> bytes:
        """Makes the body that the server stores when a request starts a turn. `replay` finds the turn by it."""
        raise InternalFailure("This route starts a turn, but cannot find it again.")

    async def replay(self, request: Request, reply: StoredReply) -> Response | None:
        """Returns the response to a repeated request: the answer that the server stored for the first request.

        Returns None if the stored work failed through the server's fault. Then the request runs again.
        """
        return Response(reply.body, status_code=reply.status, media_type="application/json")

    def as_route_error(self, error: InvalidRequest | ValidationFailed) -> GraftworkError:
        """Returns the same error with the HTTP status that routes of this class use for an invalid request."""
        return as_validation_failed(error)

    def _body_error(self, error: HTTPException) -> Exception:
        """Returns our own error that caused FastAPI's error. FastAPI raises its error when it cannot read the body."""
        cause = error.__cause__
        if isinstance(cause, InvalidRequest):
            return self.as_route_error(cause)
        if isinstance(cause, GraftworkError | ClientDisconnect):
            return cause
        return self.as_route_error(InvalidRequest(f"The body cannot be read: {error.detail}"))


class NativeRoute(AuthenticatedRoute):
    """A route of Graftwork's own API. It accepts a tenant's key."""

    async def authenticate(self, request: Request) -> Principal:
        refuse_forged(request)
        return await resources_of(request).server.gate.authenticate(presented_key(request), client_address(request))


class UploadRoute(NativeRoute):
    """A tenant's route that receives files. Its bodies may be larger than JSON bodies, and go to disk.

    Refuses an upload before it reads the body if too many uploads are in flight.
    """

    def bounded(self, request: Request) -> BoundedRequest:
        return UploadRequest(request.scope, request.receive)

    async def run(self, request: BoundedRequest, handle: Handler) -> Response:
        assert isinstance(request, UploadRequest)
        with resources_of(request).account.uploads.place(request.state.principal.tenant_id) as place:
            try:
                await request.read_form(place)
                return await super().run(request, handle)
            finally:
                await request.close()


class OpenAiRoute(NativeRoute):
    """A tenant's route that follows OpenAI's API. An invalid body gets a 400. `Idempotency-Key` has no effect."""

    is_idempotent = False

    def as_route_error(self, error: InvalidRequest | ValidationFailed) -> GraftworkError:
        return as_invalid_request(error)


class AdminRoute(AuthenticatedRoute):
    """A route that accepts only the operator's key, or a person who is an operator.

    An operator who may only read is refused with 403 where the method changes something.
    """

    async def authenticate(self, request: Request) -> AdminPrincipal:
        refuse_forged(request)
        gate = resources_of(request).server.gate
        admin = await gate.authenticate_admin(presented_key(request), client_address(request))
        if changes_state(request):
            admin.require_change()
        return admin


class ConsoleRoute(AuthenticatedRoute):
    """A route of the web console's sign-in. It accepts a tenant's key and the operator's key."""

    is_idempotent = False

    async def authenticate(self, request: Request) -> Principal | AdminPrincipal:
        refuse_forged(request)
        return await resources_of(request).server.gate.authenticate_any(presented_key(request), client_address(request))


class SecretRoute(AdminRoute):
    """An operator's route that can return a new API key. The server never stores that key with the answer."""

    def storable_body(self, body: bytes) -> bytes:
        return _without_key(body)


class TenantSecretRoute(NativeRoute):
    """The same of a tenant."""

    def storable_body(self, body: bytes) -> bytes:
        return _without_key(body)


def _without_key(body: bytes) -> bytes:
    return json.dumps(json.loads(body) | {"key": None}).encode()


def _note_sender(request: Request, place: HeldPlaces | None) -> None:
    """Gives the sender what its request has: a place, a deadline of the first token, and a trace, which notes the sender.

    Raises InvalidRequest for a wrong `x-deadline-ms` or `x-graftwork-trace`.
    """
    principal, trace = request.state.principal, request.state.trace
    if isinstance(principal, Principal):
        due_at = first_token_due_at(request)
        resources_of(request).server.traces.authenticated(trace, principal.tenant_id, principal.key_id)
        request.state.principal = replace(principal, place=place, first_token_due_at=due_at, trace=trace)


def _owner(request: Request) -> str:
    """Returns the tenant of the request's key, or the operator's name."""
    principal = request.state.principal
    return principal.tenant_id if isinstance(principal, Principal) else str(principal.name)


def _refuse_null_characters(request: Request) -> None:
    """Refuses NUL characters in the path and the query. PostgreSQL cannot store them, and no id contains one."""
    if "\x00" in request.scope["path"]:
        raise NotFound("There is nothing at this path: it holds a NUL character.")
    if b"%00" in request.scope["query_string"]:
        raise InvalidRequest("The query holds a NUL character: remove it.")
