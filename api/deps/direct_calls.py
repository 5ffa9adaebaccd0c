"""Calls handlers without FastAPI's solver, if the types of their parameters say all that it would find out.

    async def create_turn(session_id: str, body: TurnBody, request: Request, principal: InferenceKey) -> Response
                          path             JSON body       the request       a function of the request

For such a handler the solver makes a response, copies and sorts, tries four kinds of parameters and runs each dependency
through itself again: an eighth of what a chat costs a gateway. A plan that is made once calls the same functions in the
same order, and validates the body with the same model.
Whatever is not a JSON object goes to FastAPI's own handler, and an object that is not valid is the same error as there.
Never changes the OpenAPI document, which FastAPI makes from the same signature.
"""

import inspect
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, Self, get_args, get_origin, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.params import Depends
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Find = Callable[[Request], Coroutine[Any, Any, Any]]
"""Finds the value of one parameter."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the parameters of one handler are found: each has its name in one of these."""

    body: tuple[str, type[BaseModel]] | None
    requests: tuple[str, ...]
    path: tuple[str, ...]
    found: tuple[tuple[str, Find], ...]

    @classmethod
    def of(cls, route: APIRoute) -> Self | None:
        """Returns the plan of a route's handler. Returns None if it needs FastAPI's solver."""
        hints = get_type_hints(route.endpoint, include_extras=True)
        parameters = inspect.signature(route.endpoint).parameters
        if route.dependencies or not _is_response(hints.get("return")) or not set(parameters) <= set(hints):
            return None
        path = tuple(name for name in parameters if name in route.param_convertors and hints[name] is str)
        requests = tuple(name for name in parameters if hints[name] is Request)
        bodies = [(name, hints[name]) for name in parameters if _is_model(hints[name])]
        found = tuple((name, find) for name in parameters if (find := _finder(hints[name])) is not None)
        num_known = len(path) + len(requests) + len(bodies) + len(found)
        if num_known < len(parameters) or len(bodies) > 1 or len(path) < len(route.param_convertors):
            return None
        return cls(bodies[0] if bodies else None, requests, path, found)

    async def arguments(self, request: Request) -> dict[str, Any] | None:
        """Returns the handler's arguments. Returns None if the body is no JSON object, or is not sent as JSON.

        Raises what reading the body and the functions raise, and RequestValidationError for an object that is not valid.
        """
        content: Any = None
        if self.body is not None:
            kind, _, _ = request.headers.get("content-type", "").partition(";")
            if kind.strip().lower() != "application/json" or not await request.body():
                return None
            try:
                content = await request.json()
            except json.JSONDecodeError:
                return None
            if not isinstance(content, dict):
                return None
        arguments: dict[str, Any] = {name: await find(request) for name, find in self.found}
        for name in self.requests:
            arguments[name] = request
        for name in self.path:
            arguments[name] = request.path_params[name]
        if self.body is not None:
            name, model = self.body
            arguments[name] = _validated(model, content)
        return arguments


def direct_handler(route: APIRoute, framework: Handler) -> Handler:
    """Returns a function that does what `framework`, FastAPI's function for this route, does, in less time if possible."""
    plan = _Plan.of(route)
    if plan is None:
        return framework
    endpoint = route.endpoint

    async def handle(request: Request) -> Response:
        arguments = await plan.arguments(request)
        if arguments is None:
            return await framework(request)
        response: Response = await endpoint(**arguments)
        return response

    return handle


def _validated(model: type[BaseModel], content: dict[str, Any]) -> BaseModel:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        raise RequestValidationError(errors, body=content) from error


def _is_response(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Response)


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def _finder(hint: Any) -> Find | None:
    """Returns the function of `Annotated[…, Depends(function)]`, if it is async and takes the request alone."""
    finders = (
        [each.dependency for each in get_args(hint)[1:] if isinstance(each, Depends)] if _is_annotated(hint) else []
    )
    if len(finders) != 1 or not inspect.iscoroutinefunction(finders[0]):
        return None
    takes = [parameter.annotation for parameter in inspect.signature(finders[0], eval_str=True).parameters.values()]
    return finders[0] if takes == [Request] else None


def _is_annotated(hint: Any) -> bool:
    return get_origin(hint) is Annotated
