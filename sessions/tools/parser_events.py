"""Defines the events of the tool call parsers. They are the same for every format.

Owns only the event types. Events have no call id: `output_parser.py` adds it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call begins. `index` numbers the calls of one text from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments, as the model wrote them."""

    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A call has ended."""

    index: int
    name: str
    arguments: str
    """All pieces of the arguments, joined."""
    complete: bool
    """Whether the arguments are a JSON object. False if the text ended inside them, or if their JSON is wrong."""


ParserEvent = PlainText | CallStarted | CallArguments | CallFinished
