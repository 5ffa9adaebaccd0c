"""Decides which HTTP methods a path takes, for the 405 of a wrong method, and answers HEAD wherever GET is taken.

Two routes can match one path: `/v1/responses/{response_id}` also matches `/v1/responses/input_tokens`. The more
specific one owns the path: the first segment in which the two differ is a fixed name in it, and a parameter in the
other. Only the owner's methods count.
Never writes an answer: `errors.py` writes the 405.
Source: RFC 9110, section 9.1: every general-purpose server must support GET and HEAD.
"""

import asyncio
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftwork.api.http.client_presence import WATCH_CLIENT
from graftwork.api.http.streaming import WRITE_BODY

_PAST_THIS = frozenset({WATCH_CLIENT, WRITE_BODY})
"""The ways to the connection that lead past HeadMiddleware."""


class HeadMiddleware:
    """ASGI middleware that answers HEAD as the path answers GET, without the body.

    A stream ends as soon as its headers are known. A path that does not take GET refuses HEAD.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        """`routes` are all routes of the application."""
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            as_get = {**scope, "method": "GET"}
            if "GET" in methods_at(as_get, self._routes):
                as_get["state"] = {name: value for name, value in scope["state"].items() if name not in _PAST_THIS}
                head = _HeadOnly(receive, send)
                scope, receive, send = as_get, head.receive, head.send
        await self._app(scope, receive, send)


class _HeadOnly:
    """Sends the beginning of a response and drops the rest. Then it tells the application that the client has left."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._has_begun = asyncio.Event()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._send(message)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            self._has_begun.set()

    async def receive(self) -> Message:
        received: asyncio.Future[Message] = asyncio.ensure_future(self._receive())
        begun: asyncio.Future[Any] = asyncio.ensure_future(self._has_begun.wait())
        waits: list[asyncio.Future[Any]] = [received, begun]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return received.result() if received.done() else {"type": "http.disconnect"}
        finally:
            received.cancel()
            begun.cancel()


def methods_at(scope: Scope, routes: Iterable[BaseRoute]) -> list[str]:
    """Returns the methods that the path of a request takes, in alphabetical order. Empty for an unknown path."""
    matching = [route for route in _plain(routes) if route.matches(scope)[0] is not Match.NONE]
    owner = min((_parameters(route) for route in matching), default=None)
    return sorted(_methods(route for route in matching if _parameters(route) == owner))


def refuse_methods_of_wider_paths(app: Starlette, routes: Iterable[BaseRoute]) -> None:
    """Makes a path refuse the methods that only a less specific route takes. Without this, that route would answer.

    Call this before `routes` are added to the application, because the first route that matches answers.
    """
    known = list(_plain(routes))
    for path in dict.fromkeys(route.path for route in known):
        own = _methods(route for route in known if route.path == path)
        wider = [route for route in known if route.path != path and route.path_regex.match(path)]
        if refused := _methods(wider) - own:
            app.router.routes.append(Route(path, _refuse, methods=sorted(refused), include_in_schema=False))


async def _refuse(request: Request) -> NoReturn:
    raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED)


def _plain(routes: Iterable[BaseRoute]) -> Iterable[Route]:
    return (route for route in routes if isinstance(route, Route))


def _methods(routes: Iterable[Route]) -> set[str]:
    methods = {method for route in routes for method in route.methods or ()}
    return methods | {"HEAD"} if "GET" in methods else methods


def _parameters(route: Route) -> tuple[bool, ...]:
    """Returns for each segment of the route's path whether it has a parameter. The smaller value is more specific."""
    return tuple("{" in segment for segment in route.path.split("/"))
