"""Defines the options of one turn, and the turns of one call of `Session.run`."""

from dataclasses import dataclass
from typing import Any, TypedDict

from graftwork.api.sdk.transport.tools import Tools, ToolTimeout
from graftwork.platform.answers.sessions import Turn
from graftwork.platform.answers.usage import Usage


class GoingOn(TypedDict, total=False):
    """The options of a turn that tool outputs start."""

    service_tier: str
    """The service tier, `priority`, `default` or `flex`. `Turn.service_tier` says which one served the turn."""
    user: str
    """An id of the end user for whom the turn runs, whose limits then count. Choose one that names nobody."""


class TurnParameters(GoingOn, total=False):
    """The options of one turn. They apply only to this turn, and do not change the settings of the session."""

    if_head: str
    """The checkpoint from which the turn must continue.

    If the session's latest checkpoint is another one, the call raises ConflictError.
    """
    tool_hints: dict[str, dict[str, Any]]
    """How long each tool takes, as in `{name: {"expected_ms": 800}}`.

    The server keeps the session's cache on the device for about that long.
    """
    tool_choice: str | dict[str, Any]
    response_format: dict[str, Any]
    sampling: dict[str, Any]
    deadline_ms: int
    """Milliseconds in which the first token must come. If the server expects a later one, it refuses the turn at once."""
    cancel_on_disconnect: bool
    """Whether the server cancels the turn when this connection breaks. By default the turn continues."""


@dataclass(frozen=True, slots=True)
class Run:
    """The turns of one call of `Session.run` or `Session.resume`. The last turn has the answer.

    If `resume` finds nothing to continue, `turns` is empty.
    """

    turns: tuple[Turn, ...]

    @property
    def turn(self) -> Turn:
        return self.turns[-1]

    @property
    def text(self) -> str:
        return self.turn.text if self.turns else ""

    @property
    def usages(self) -> tuple[Usage, ...]:
        return tuple(turn.usage for turn in self.turns if turn.usage is not None)


@dataclass(frozen=True, slots=True)
class Rounds:
    """How one call of `Session.run` or `Session.resume` goes on after a turn that calls tools."""

    tools: Tools
    tool_timeout: ToolTimeout
    max_turns: int
    options: GoingOn
