"""Defines what the endpoints of batches get to answer a line. Answers nothing itself."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import RequestId
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.generation.held_account import HeldAccount

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LineWork:
    """One line of a batch that is to be answered now."""

    body: Mapping[str, Any]
    principal: Principal
    request_id: RequestId
    """Another one in each epoch of the batch."""
    held: HeldAccount
    number: int
    """The number of the line, from 1."""


AnswerLine = Callable[[str, LineWork], Awaitable[Json]]
"""Answers a request to an endpoint with the body of the answer. Raises a GraftworkError."""


def refuse_field(name: str, value: object, why: str) -> None:
    """Raises InvalidRequest if a line has a field that a batch cannot serve. `why` is a sentence without a full stop."""
    if value:
        raise InvalidRequest(f"{why}: leave {name} out.", param=name)
