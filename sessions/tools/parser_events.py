"""What a parser of tool calls finds in a generated text, whatever form the calls are written in."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call is announced; `index` counts the calls of one text from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments, as written."""

    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A call has ended."""

    index: int
    name: str
    arguments: str
    """All deltas, joined."""
    complete: bool
    """The arguments are a JSON object; False when the text broke off, or the JSON broke, within them."""


ParserEvent = PlainText | CallStarted | CallArguments | CallFinished
