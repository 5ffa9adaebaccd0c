"""Defines the events of the tool call parsers. Every format of tool calls has the same events.

Owns only the event types. Never gives a call an id: `output_parser.py` does.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text outside of tool calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call begins. `index` is the number of the call in the text, from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, as the model wrote it."""

    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A tool call has ended. This event has the whole call."""

    index: int
    name: str
    arguments: str
    """All pieces of the arguments, joined."""
    complete: bool
    """Whether the arguments are a JSON object. It is False if the text ended inside them, or if their JSON is wrong."""


ParserEvent = PlainText | CallStarted | CallArguments | CallFinished
