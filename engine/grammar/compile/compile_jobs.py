"""Defines the messages between the engine and its compile server, and writes and reads them.

    lengths of the three parts: 3 x u32 LE ‖ JSON ‖ payload ‖ compact

The JSON is `{"job": {…}}` or `{"answer": {…}}`. The two compiled forms of an answer follow as they are; a job has none.
To read a message runs no code of its sender: a process that compiles hostile grammars cannot make the engine do more
than fail.
"""

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.schema.lint import GrammarEngine

_HEADER = struct.Struct("<III")
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
    payload, compact = b"", b""
    if isinstance(message, CompileJob):
        head = {"job": asdict(message)}
    else:
        payload, compact = message.payload, message.compact
        head = {"answer": asdict(replace(message, payload=b"", compact=b"")) | {"payload": None, "compact": None}}
    text = json.dumps(head).encode()
    forward(stream, _HEADER.pack(len(text), len(payload), len(compact)) + text + payload + compact)


def forward(stream: int, content: bytes) -> None:
    """Writes a message that is already encoded to a file descriptor. `content` begins with the message's length."""
    view = memoryview(content)
    while view:
        view = view[os.write(stream, view) :]


def receive(stream: int) -> CompileJob | CompileAnswer | None:
    """Reads one message from a file descriptor. Returns None at the end of the stream.

    Raises ValueError if it is not a message of this module.
    """
    header = _read(stream, _HEADER.size)
    if not header:
        return None
    text, payload, compact = (_read(stream, size) for size in _HEADER.unpack(header))
    try:
        return _message(json.loads(text), payload, compact)
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a message about grammars: {error}") from error


def _message(head: Mapping[str, Any], payload: bytes, compact: bytes) -> CompileJob | CompileAnswer:
    if "job" in head:
        source = head["job"]["source"]
        return CompileJob(**head["job"] | {"source": GrammarSource(**source | {"kind": GrammarKind(source["kind"])})})
    engine = head["answer"]["engine"]
    parts = {"engine": engine and GrammarEngine(engine), "payload": payload, "compact": compact}
    return CompileAnswer(**head["answer"] | parts)


def _read(stream: int, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = os.read(stream, size - len(content))
        if not part:
            return b""
        content += part
    return content
