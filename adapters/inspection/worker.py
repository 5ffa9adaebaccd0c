"""Validates uploaded adapters in a process of its own: `python -m graftwork.adapters.inspection.worker <socket>`.

    {"ready"}  →  {limits, lengths, description} + files  →  {"identified"} or {"refused"} or {"exceeded"}  →  …

For each upload, the parent process sends one message: the limits, the lengths of the two uploaded files, a description
of the model, and the two open files. To convert a GGUF file, it sends that file and an empty one for the weights, and gets
the configuration. The worker has no torch, no database, no keys, and no
connection except the socket to its parent. It sets its own limits of address space and processor time for each upload,
and ends when its parent ends. If an upload breaks the worker, the parent kills it and starts a new one.
"""

import errno
import mmap
import os
import resource
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from graftwork.adapters.format.gguf_adapter import peft_files
from graftwork.adapters.format.identity import identify_adapter
from graftwork.adapters.inspection.frames import receive_files, send
from graftwork.engine.core.expert_shapes import ExpertShapes
from graftwork.engine.core.layer_modules import LayerModules
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.errors import ValidationFailed

_MOST_FILES = 32


def main() -> None:
    """Validates the adapters that the parent process sends, one after another, until the parent closes the socket."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, _MOST_FILES)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        send(connection, {"ready": os.getpid()})
        while True:
            order, descriptors = receive_files(connection)
            try:
                send(
                    connection,
                    _convert(order, *descriptors) if order.get("converts") else _inspect(order, *descriptors),
                )
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)


def _inspect(order: dict[str, Any], config_file: int, weights_file: int) -> dict[str, Any]:
    with _limits(order) as exceeded, _content(weights_file, order["weights_bytes"]) as weights:
        config, description = os.pread(config_file, order["config_bytes"], 0), _description(order["description"])
        return _identify(config, weights, description)
    return exceeded


def _convert(order: dict[str, Any], gguf_file: int, weights_file: int) -> dict[str, Any]:
    """Writes the weights of a GGUF file as safetensors, and answers with the configuration."""
    with _limits(order) as exceeded, _content(gguf_file, order["weights_bytes"]) as content:
        return _write_converted(content, _description(order["description"]), weights_file)
    return exceeded


def _write_converted(content: memoryview, description: EngineDescription, weights_file: int) -> dict[str, Any]:
    try:
        files = peft_files(content, description)
        for piece in files.weights(content):
            _write_all(weights_file, piece)
    except ValidationFailed as error:
        return _refusal(error)
    return {"converted": files.config.decode()}


def _write_all(descriptor: int, piece: bytes | memoryview) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


@contextmanager
def _content(descriptor: int, num_bytes: int) -> Generator[memoryview]:
    """Maps a file into memory."""
    if num_bytes == 0:  # nothing can be mapped
        yield memoryview(b"")
        return
    with mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
        yield view


@contextmanager
def _limits(order: dict[str, Any]) -> Generator[dict[str, Any]]:
    """Limits processor time and address space during the block. Above the latter, the block ends, and the dictionary that
    was yielded is the answer.
    """
    answer: dict[str, Any] = {}
    signal.setitimer(signal.ITIMER_PROF, order["cpu_s"])  # without a handler the signal ends the process
    try:
        _limit(resource.RLIMIT_AS, order["memory_bytes"])
        yield answer
    except MemoryError:
        answer["exceeded"] = "memory"
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        answer["exceeded"] = "memory"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)


def _identify(config: bytes, weights: memoryview, description: EngineDescription) -> dict[str, Any]:
    try:
        spec, digest = identify_adapter(config, weights, description)
    except ValidationFailed as error:
        return _refusal(error)
    found = {"digest": digest, "r": spec.r, "rank": spec.rank, "target_modules": spec.target_modules}
    return {"identified": found}


def _refusal(error: ValidationFailed) -> dict[str, Any]:
    return {"refused": error.message, "param": error.param, "code": error.code}


def _description(fields: dict[str, Any]) -> EngineDescription:
    shapes = {target: (out, into) for target, (out, into) in fields["target_shapes"].items()}
    experts = None if fields["experts"] is None else ExpertShapes.from_json(fields["experts"])
    modules = None if fields["modules"] is None else LayerModules.from_json(fields["modules"])
    own = {"target_shapes": shapes, "biased_targets": tuple(fields["biased_targets"]), "experts": experts}
    return EngineDescription(**fields | own | {"modules": modules})


def _limit(kind: int, most: int) -> None:
    """Sets a soft limit of the process, so that the next file can get another one.

    Never exceeds the operator's hard limit.
    """
    _, hard = resource.getrlimit(kind)
    fits = hard == resource.RLIM_INFINITY or (most != resource.RLIM_INFINITY and most <= hard)
    resource.setrlimit(kind, (most if fits else hard, hard))


if __name__ == "__main__":
    main()
