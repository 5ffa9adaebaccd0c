"""Sends and receives the messages between the gateway and a worker process that inspects uploaded adapters.

    length: u32 LE ‖ JSON          if the message has files, their descriptors are sent together with the length

Owns the form of a message on the socket: a JSON object, and sometimes the descriptors of open files. Never executes or
unpickles received data, so neither side has to trust the other.
"""

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = 1024 * 1024
_MOST_DESCRIPTORS = 2


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends one message, and with it the descriptors of at most two open files.

    Raises OSError if the process on the other side has ended.
    """
    body = json.dumps(message).encode()
    frame = len(body).to_bytes(_LENGTH_BYTES, "little")
    if not descriptors:
        connection.sendall(frame + body)
    else:
        socket.send_fds(connection, [frame], descriptors)
        connection.sendall(body)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Returns the next message. The system closes the descriptors that came with it, which only a broken sender adds.

    Raises EOFError if the process on the other side has ended, TimeoutError if nothing arrives within the socket's
    timeout, and ValueError if the message is not a JSON object or is too long.
    """
    return _message(connection, connection.recv(_LENGTH_BYTES))


def receive_files(connection: socket.socket) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Returns the next message, and the file descriptors that came with it.

    The caller must close the descriptors. Raises the errors of `receive`, and then closes them itself.
    """
    frame, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, _MOST_DESCRIPTORS)
    try:
        return _message(connection, frame), tuple(descriptors)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _message(connection: socket.socket, frame: bytes) -> dict[str, Any]:
    """Reads the rest of a message. `frame` has the first bytes of its length; none if the other side has ended."""
    if not frame:
        raise EOFError
    length = int.from_bytes(frame + _read(connection, _LENGTH_BYTES - len(frame)), "little")
    if length > _MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes")
    message = json.loads(_read(connection, length))
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")  # noqa: TRY004 - nonsense, like what is no JSON
    return message


def _read(connection: socket.socket, number: int) -> bytes:
    parts = bytearray()
    while len(parts) < number:
        part = connection.recv(number - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
