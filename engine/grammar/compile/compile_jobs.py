"""What the engine and its nursery say to each other: messages of one program to itself, each a length and a pickle."""

import os
import pickle
import struct
from dataclasses import dataclass
from typing import Any

from graftwork.engine.core.requests import GrammarSource
from graftwork.engine.grammar.schema.lint import GrammarEngine

_HEADER = struct.Struct("!I")
BUSY = "nursery_busy"
"""The code of an answer that says nothing of the grammar: there was no processor for it in time."""
CHILDREN = 2
"""Compiles at a time."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One grammar, and what it may cost."""

    number: int
    source: GrammarSource
    seconds: float
    wall_seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class CompileAnswer:
    """How one job ended."""

    number: int
    seconds: float
    """Of wall clock, in the child."""
    engine: GrammarEngine | None = None
    payload: bytes = b""
    compact: bytes = b""
    """The same in its compact spelling; empty where there is none."""
    refusal: str = ""
    """What is wrong with the grammar; empty where there is a payload."""
    param: str = "#"
    code: str = "unsupported_grammar"


def send(stream: int, message: CompileJob | CompileAnswer) -> None:
    """Write one message, wholly."""
    content = pickle.dumps(message)
    forward(stream, _HEADER.pack(len(content)) + content)


def forward(stream: int, content: bytes) -> None:
    """Write what has been written somewhere before."""
    view = memoryview(content)
    while view:
        view = view[os.write(stream, view) :]


def receive(stream: int) -> Any:
    """Read one message; None at the end of the stream."""
    header = _read(stream, _HEADER.size)
    content = _read(stream, _HEADER.unpack(header)[0]) if header else b""
    return pickle.loads(content) if content else None


def _read(stream: int, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = os.read(stream, size - len(content))
        if not part:
            return b""
        content += part
    return content
