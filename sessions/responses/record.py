"""A response of the Responses API before and after it is started, as values.

A response is one turn of a session: its id is the turn's under another prefix, so that either leads to the other and
whoever follows the turn knows the response.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graftwork.platform.ids import SessionId, TurnId
from graftwork.sessions.core.items import Item
from graftwork.sessions.core.session import SessionSettings

_RESPONSE, _TURN = "resp_", "turn_"


@dataclass(frozen=True, slots=True)
class ResponseOrder:
    """What a client asks for, read but not yet checked against anything stored."""

    model: str
    items: tuple[Item, ...]
    """What is new: messages, calls that the client remembers itself, and the outputs of calls."""
    settings: SessionSettings
    """All of them: a response inherits none."""
    echo: Mapping[str, Any]
    """The fields of the request as the response's body repeats them."""
    is_stored: bool = True
    is_background: bool = False
    previous_response_id: str | None = None
    conversation_id: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """What is known of a response besides its turn."""

    turn_id: TurnId
    session_id: SessionId
    echo: Mapping[str, Any]
    created_at: float

    @property
    def response_id(self) -> str:
        return _RESPONSE + self.turn_id.removeprefix(_TURN)

    @property
    def is_background(self) -> bool:
        return bool(self.echo["background"])

    @property
    def is_stored(self) -> bool:
        return bool(self.echo["store"])


def turn_of(response_id: str) -> TurnId:
    """The turn that a response is."""
    return TurnId(_TURN + response_id.removeprefix(_RESPONSE))
