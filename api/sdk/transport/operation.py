"""Lets one method work in both the synchronous client and the asyncio client. Never sends a request itself.

A method with the decorator `operation` is written once, as a generator of effects (see effects.py). In `Graftwork`, a
call of the method returns the result. In `AsyncGraftwork`, it returns an awaitable. Type checkers see the difference,
because the class `Resource` has the type of its runtime as a parameter.
"""

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, get_args, get_type_hints, overload
from urllib.parse import quote

from graftwork.api.sdk.transport.effects import Call, Steps
from graftwork.api.sdk.transport.retries import send
from graftwork.api.sdk.transport.runtimes import AsyncRuntime, Runtime, SyncRuntime
from graftwork.platform.answers.base import Answer, Page

R = TypeVar("R", bound=Runtime)


S = TypeVar("S")


P = ParamSpec("P")


T = TypeVar("T")


A = TypeVar("A", bound=Answer)


class Resource(Generic[R]):
    """The base class of the client's groups of methods, such as `client.sessions`.

    All methods of a group use the same runtime. A runtime sends requests for the synchronous client or for the asyncio
    client.
    """

    def __init__(self, runtime: R) -> None:
        self._runtime: R = runtime

    def _json(self, call: Call) -> Steps[Mapping[str, Any]]:
        """Sends the call and returns the answer's JSON. An empty answer becomes an empty object."""
        response = yield from send(call, self._runtime.policy)
        body: Mapping[str, Any] = response.json() if response.content else {}
        return body

    def _read(self, answer_class: type[A], call: Call) -> Steps[A]:
        """Sends the call and returns its answer as an `answer_class`."""
        return answer_class.read((yield from self._json(call)))

    def _page(self, answer_class: type[A], call: Call) -> Steps[Page[A]]:
        """Sends the call and returns one page of answers."""
        return Page[answer_class].read((yield from self._json(call)))  # type: ignore[valid-type]  # known at run time


class operation(Generic[S, P, T]):  # noqa: N801 - a decorator has a name in lower case
    """Decorates a method that is a generator of effects. A call of the method performs these effects.

    An effect describes one input or output, such as sending a request (see effects.py). The runtime of the method's
    `Resource` performs it.
    """

    def __init__(self, steps: Callable[Concatenate[S, P], Steps[T]]) -> None:
        self._steps = steps
        self._signatures: dict[type[Any], inspect.Signature] = {}
        functools.update_wrapper(self, steps)

    def __set_name__(self, owner: type[Any], name: str) -> None:
        """Replaces `Steps[T]` by T in the signature that `help` and notebooks show."""
        hints = get_type_hints(self._steps, localns={owner.__name__: owner})
        _, _, result = get_args(hints["return"])
        self.__signature__ = inspect.signature(self._steps).replace(return_annotation=result)

    def __call__(self, resource: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Calls the method like a function of the class: `Sessions.get(client.sessions, "ses_…")`."""
        return self.__get__(resource, type(resource))(*args, **kwargs)

    @overload
    def __get__(self, resource: None, owner: type[Any]) -> Self: ...
    @overload
    def __get__(self, resource: Resource[SyncRuntime], owner: type[Any]) -> Callable[P, T]: ...
    @overload
    def __get__(self, resource: Resource[AsyncRuntime], owner: type[Any]) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, resource: Any, owner: type[Any]) -> Any:
        if resource is None:
            return self

        runtime = resource._runtime

        def bound(*args: P.args, **kwargs: P.kwargs) -> Any:
            return runtime.run(self._steps(resource, *args, **kwargs))

        async def bound_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            return await runtime.run(self._steps(resource, *args, **kwargs))

        method = functools.update_wrapper(bound_async if isinstance(runtime, AsyncRuntime) else bound, self._steps)
        vars(method)["__signature__"] = self._signature_for(type(runtime))
        return method

    def _signature_for(self, runtime: type[Any]) -> inspect.Signature:
        """Returns the signature without `self`, and with the runtime's type for R."""
        if runtime not in self._signatures:
            signature = self.__signature__
            result = signature.return_annotation
            if R in getattr(result, "__parameters__", ()):
                result = result[runtime]
            parameters = list(signature.parameters.values())[1:]
            self._signatures[runtime] = signature.replace(parameters=parameters, return_annotation=result)
        return self._signatures[runtime]


def path_segment(name: str) -> str:
    """Quotes a name for a URL, so that the name is exactly one segment of the path."""
    return quote(name, safe="@")
