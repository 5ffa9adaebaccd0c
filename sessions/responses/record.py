"""Defines a response of the Responses API as a value, before and after it has started.

Never reads or writes the database.
Invariant: a response is one turn of a session, and its id is the turn's id with another prefix.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graftwork.platform.ids import SessionId, TurnId
from graftwork.sessions.core.session import SessionSettings
from graftwork.sessions.responses.references import InputEntry

_RESPONSE, _TURN = "resp_", "turn_"


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A request for a new response. Its fields are not yet checked against the database."""

    model: str
    items: tuple[InputEntry, ...]
    """The new input: messages, tool calls that the client sends again, outputs of tool calls, and references."""
    settings: SessionSettings
    """All settings. A response inherits none from the previous response."""
    echo: Mapping[str, Any]
    """The request's fields that the response's body repeats."""
    tool_paths: tuple[str, ...] = ()
    """For each tool of the settings, the path of the request's field that has it, such as `tools[1].tools[0]`."""
    ignored: tuple[str, ...] = ()
    """The parts of the request that are left out, each with what it was in parentheses."""
    is_stored: bool = True
    is_background: bool = False
    previous_response_id: str | None = None
    conversation_id: str | None = None
    names_tools: bool = False
    """Whether the settings' tools are meant, also if there are none, instead of the adapter's own."""
    end_user: str | None = None
    """The end user that the request names. A new chain of responses uses their version of a canary."""


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A response, without the model's answer. The answer is stored with the turn that makes the response."""

    turn_id: TurnId
    session_id: SessionId
    echo: Mapping[str, Any]
    created_at: float

    @property
    def response_id(self) -> str:
        return response_of(self.turn_id)

    @property
    def is_background(self) -> bool:
        return bool(self.echo["background"])

    @property
    def is_stored(self) -> bool:
        return bool(self.echo["store"])


def response_of(turn_id: TurnId) -> str:
    """Returns the id of the response that a turn makes."""
    return _RESPONSE + turn_id.removeprefix(_TURN)


def turn_of(response_id: str) -> TurnId:
    """Returns the id of the turn that makes a response. Both ids differ only in their prefix: `resp_` or `turn_`."""
    return TurnId(_TURN + response_id.removeprefix(_RESPONSE))
