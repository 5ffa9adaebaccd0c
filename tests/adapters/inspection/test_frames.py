"""Tests of the messages between the gateway and the workers that inspect uploads: no sender can leave files open."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graftwork.adapters.inspection.frames import receive_files, send
from graftwork.adapters.inspection.process import InspectionProcess, WorkerEnded

BROKEN = """
import os, socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]
for body in (b'{"ready": 1}', b'{"identified": {}}', b"[]"):
    socket.send_fds(connection, [len(body).to_bytes(4, "little")], files)
    connection.sendall(body)
while connection.recv(65536):  # an end while orders come would make their sender fail
    pass
"""


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_worker_that_sends_files_leaves_none_open() -> None:
    """The descriptors that a broken worker adds to its answers, readable or not, stay open nowhere."""
    before = open_descriptors()
    worker = InspectionProcess((sys.executable, "-c", BROKEN))
    worker.prepare()

    answer = worker.ask({}, (0, 1), 60.0)
    with pytest.raises(WorkerEnded, match="no object"):
        worker.ask({}, (0, 1), 60.0)
    worker.kill()

    assert answer == {"identified": {}}
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("body", "problem"), [(b"[]", "no object"), (b"nonsense", "Expecting value"), (b"\xff\xff\xff", "codec")]
)
def test_the_files_of_an_unreadable_message_are_closed(
    body: bytes, problem: str, pair: tuple[socket.socket, socket.socket]
) -> None:
    """A message that is no JSON object is refused, and its descriptors are closed."""
    ours, theirs = pair
    before = open_descriptors()

    socket.send_fds(theirs, [len(body).to_bytes(4, "little")], [0, 1])
    theirs.sendall(body)
    with pytest.raises(ValueError, match=problem):
        receive_files(ours)

    assert open_descriptors() == before


def test_files_arrive_with_their_message(pair: tuple[socket.socket, socket.socket]) -> None:
    """The receiver of a message can read the files that were sent with it."""
    ours, theirs = pair
    readable, writable = os.pipe()
    os.write(writable, b"content")

    send(theirs, {"a": 1}, (readable,))
    message, (received,) = receive_files(ours)
    content = os.read(received, 100)
    for descriptor in (readable, writable, received):
        os.close(descriptor)

    assert (message, content) == ({"a": 1}, b"content")
