"""Defines the messages between the engine and its compile server, and writes and reads them.

A message is its length in 4 bytes, then its content as a pickle. Unpickling is safe here, because only this program's
own processes write to these pipes.
"""

import os
import pickle
import struct
from dataclasses import dataclass
from typing import Any

from graftwork.engine.core.requests import GrammarSource
from graftwork.engine.grammar.schema.lint import GrammarEngine

_HEADER = struct.Struct("!I")
BUSY = "compile_server_busy"
"""The code of an answer if the machine was too busy to compile in time. The grammar itself may be valid."""
CHILDREN = 2
"""The number of grammars that are compiled at the same time."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """The task to compile one grammar, with the limits of this compile."""

    number: int
    source: GrammarSource
    seconds: float
    wall_seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class CompileAnswer:
    """The result of one compile job: the compiled grammar, or the reason why there is none."""

    number: int
    seconds: float
    """Seconds of wall time that the compile took in its process."""
    engine: GrammarEngine | None = None
    payload: bytes = b""
    compact: bytes = b""
    """The compiled form of the same grammar with only one spelling of each answer, for drafts. Empty if there is none.
    """
    refusal: str = ""
    """The reason why the grammar was not compiled. Empty if there is a payload."""
    param: str = "#"
    code: str = "unsupported_grammar"


def send(stream: int, message: CompileJob | CompileAnswer) -> None:
    """Encodes a message and writes it to a file descriptor. Returns when everything is written."""
    content = pickle.dumps(message)
    forward(stream, _HEADER.pack(len(content)) + content)


def forward(stream: int, content: bytes) -> None:
    """Writes a message that is already encoded to a file descriptor. `content` begins with the message's length."""
    view = memoryview(content)
    while view:
        view = view[os.write(stream, view) :]


def receive(stream: int) -> Any:
    """Reads one message from a file descriptor, and unpickles it. Returns None at the end of the stream."""
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
