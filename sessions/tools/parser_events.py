"""Defines the events of the tool call parsers. Every format of tool calls has the same events.

Owns only the event types. Never gives a call an id: `output_parser.py` does.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlainText:
    """A piece of text outside of tool calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call begins. `index` counts the calls in the generated text, from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments of a tool call, as the model wrote it."""

    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A tool call has ended. This event has the name and all arguments of the call."""

    index: int
    name: str
    arguments: str
    """All pieces of the arguments, joined."""
    complete: bool
    """Whether the arguments are a JSON object. It is False if the text ended inside them, or if their JSON is wrong."""


ParserEvent = PlainText | CallStarted | CallArguments | CallFinished
