"""Decides which HTTP methods a path takes, for the 405 of a wrong method.

Two routes can match one path: `/v1/responses/{response_id}` also matches `/v1/responses/input_tokens`. The more
specific one owns the path: the first segment in which the two differ is a fixed name in it, and a parameter in the
other. Only the owner's methods count.
Never sends an answer: `errors.py` writes the 405.
"""

from collections.abc import Iterable
from http import HTTPStatus
from typing import NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope


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
    return {method for route in routes for method in route.methods or ()}


def _parameters(route: Route) -> tuple[bool, ...]:
    """Returns for each segment of the route's path whether it has a parameter. The smaller value is more specific."""
    return tuple("{" in segment for segment in route.path.split("/"))
