"""Tests of handlers that are called without FastAPI's solver: they get and answer what FastAPI's own calls do."""

from types import ModuleType
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel

from graftwork.api.deps.direct_calls import Handler, direct_handler
from graftwork.api.routes import chat, completions, embeddings, messages, responses, session_turns


class _DirectRoute(APIRoute):
    def get_route_handler(self) -> Handler:
        return direct_handler(self, super().get_route_handler())


class _Body(BaseModel):
    name: str
    count: int = 1


async def _first(request: Request) -> str:
    request.app.state.calls.append("first")
    return request.headers.get("x-first", "nothing")


async def _second(request: Request) -> str:
    request.app.state.calls.append("second")
    if "x-refused" in request.headers:
        raise ZeroDivisionError("refused")
    return request.url.path


async def _with_query(value: int = 3) -> int:
    return value


First = Annotated[str, Depends(_first)]
Second = Annotated[str, Depends(_second)]


def _answer(**values: Any) -> Response:
    return JSONResponse(values)


async def full(key: str, body: _Body, request: Request, first: First, second: Second, number: str) -> Response:
    return _answer(key=key, body=body.model_dump(), method=request.method, first=first, second=second, number=number)


async def bodiless(request: Request, first: First) -> Response:
    return _answer(method=request.method, first=first)


async def with_query(body: _Body, limit: Annotated[int, Query(ge=1)] = 5) -> Response:
    return _answer(body=body.model_dump(), limit=limit)


async def with_nested(body: _Body, value: Annotated[int, Depends(_with_query)]) -> Response:
    return _answer(body=body.model_dump(), value=value)


async def with_number(number: int, first: First) -> Response:
    return _answer(number=number, first=first)


async def with_model(body: _Body) -> _Body:
    return body


def _app(route_class: type[APIRoute]) -> FastAPI:
    app, router = FastAPI(), APIRouter(prefix="/{key}", route_class=route_class)
    for path, endpoint in (
        ("/full/{number}", full),
        ("/bodiless", bodiless),
        ("/query", with_query),
        ("/nested", with_nested),
        ("/number/{number}", with_number),
        ("/model", with_model),
    ):
        router.post(path)(endpoint)
    app.include_router(router)
    app.state.calls = []
    return app


_JSON = "application/json"
_CONTENTS: list[tuple[str, bytes]] = [
    (_JSON, b'{"name": "a"}'),
    (_JSON, b'{"name": "a", "count": 7, "more": []}'),
    ("Application/JSON; charset=utf-8", b'{"name": "\xc3\xa9"}'),
    ("application/problem+json", b'{"name": "a"}'),
    ("text/json", b'{"name": "a"}'),
    ("", b'{"name": "a"}'),
    (_JSON, b""),
    (_JSON, b"{"),
    (_JSON, b"[1]"),
    (_JSON, b"null"),
    (_JSON, b'"text"'),
    (_JSON, b'{"count": "many"}'),
    (_JSON, b'{"name": null, "count": 1.5}'),
]


@pytest.mark.parametrize(
    "path",
    [
        "/k/full/7",
        "/k%20/full/a%2Fb",
        "/k/bodiless",
        "/k/query?limit=0",
        "/k/query",
        "/k/nested?value=x",
        "/k/number/7",
        "/k/number/x",
        "/k/model",
    ],
)
async def test_a_direct_call_answers_as_fastapi_does(path: str) -> None:
    """For every body and path, the status, the content and the calls are those of FastAPI's own handler."""
    for kind, content in _CONTENTS:
        answers, calls = [], []
        for route_class in (APIRoute, _DirectRoute):
            app = _app(route_class)
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                answers.append(await client.post(path, content=content, headers={"content-type": kind, "x-first": "1"}))
            calls.append([*dict.fromkeys(app.state.calls)])

        expected, found = answers
        assert (found.status_code, found.content) == (expected.status_code, expected.content), (kind, content)
        assert calls[0] == calls[1]


async def test_a_function_that_refuses_is_called_before_the_body_is_checked() -> None:
    """An error of a dependency goes before an error of the body, as FastAPI has it."""
    for route_class in (APIRoute, _DirectRoute):
        transport = httpx.ASGITransport(app=_app(route_class))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            with pytest.raises(ZeroDivisionError, match="refused"):
                await client.post("/k/full/7", json={"name": 1}, headers={"x-refused": "1"})


_BEGIN_WORK = (
    (chat, "create_chat_completion"),
    (completions, "create_completion"),
    (embeddings, "create_embeddings"),
    (messages, "create_message"),
    (responses, "create_response"),
    (session_turns, "create_turn"),
    (session_turns, "send_tool_outputs"),
)


@pytest.mark.parametrize(("module", "name"), _BEGIN_WORK)
def test_the_routes_of_most_requests_are_called_directly(module: ModuleType, name: str) -> None:
    """Every route that begins work of an engine does without the solver."""

    async def framework(request: Request) -> Response:
        return Response()

    (route,) = [route for route in module.router.routes if route.name == name]

    assert direct_handler(route, framework) is not framework
