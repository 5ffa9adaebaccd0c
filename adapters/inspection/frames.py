"""Sends and receives the messages between the gateway and a worker process that inspects uploaded adapters.

    length: u32 LE ‖ JSON          if the message has a file, its descriptor is sent together with the length

Owns the form of a message on the socket: a JSON object, and sometimes the descriptor of an open file. Never executes or
unpickles received data, so neither side has to trust the other.
"""

import json
import os
import socket
from typing import Any

_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = 1024 * 1024


def send(connection: socket.socket, message: dict[str, Any], descriptor: int | None = None) -> None:
    """Sends one message, and with it the file descriptor `descriptor` if it is given.

    Raises OSError if the process on the other side has ended.
    """
    body = json.dumps(message).encode()
    frame = len(body).to_bytes(_LENGTH_BYTES, "little")
    if descriptor is None:
        connection.sendall(frame + body)
    else:
        socket.send_fds(connection, [frame], [descriptor])
        connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], int | None]:
    """Returns the next message, and the file descriptor that came with it (None without a file).

    The caller must close the descriptor. Raises EOFError if the process on the other side has ended, TimeoutError if
    nothing arrives within the socket's timeout, and ValueError if the message is not a JSON object or is too long.
    """
    frame, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, 1)
    descriptor = descriptors[0] if descriptors else None
    try:
        frame += _read(connection, _LENGTH_BYTES - len(frame)) if frame else b""
        length = int.from_bytes(frame, "little")
        if not frame:
            raise EOFError
        if length > _MAX_FRAME_BYTES:
            raise ValueError(f"a message of {length} bytes")
        message = json.loads(_read(connection, length))
    except (OSError, ValueError, EOFError):
        if descriptor is not None:
            os.close(descriptor)
        raise
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")  # noqa: TRY004 - nonsense, like what is no JSON
    return message, descriptor


def _read(connection: socket.socket, number: int) -> bytes:
    parts = bytearray()
    while len(parts) < number:
        part = connection.recv(number - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
