"""Reads the input file of a batch line by line, and finds what is wrong with it.

Each line is a JSON object with `custom_id`, `method`, `url` and `body`. Owns these rules. Never reads a body: the
endpoint does, when it answers the line, so a wrong body is an error of its line alone.
Reads on other threads, and parses long lines in another process, so that nobody waits for a large file.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from graftwork.platform.batches.batch import LineProblem
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.strict_json import parse_json

MAX_LINE_BYTES = 8 * 1024 * 1024
"""The most bytes of a line: those of a request's body."""
LONG_LINE_BYTES = 64 * 1024
MAX_CUSTOM_ID = 512
MAX_PROBLEMS = 100
_LINES_PER_READ = 256
_BYTES_PER_READ = 1024 * 1024
_BOM = b"\xef\xbb\xbf"

ParseLong = Callable[[bytes], Awaitable[Any]]
"""Parses long JSON off the event loop. Raises InvalidRequest with the reason."""


@dataclass(frozen=True, slots=True)
class InputLine:
    """One line of an input file that is not empty. `number` counts all lines of the file from 1."""

    number: int
    raw: bytes


@dataclass(frozen=True, slots=True)
class LineRequest:
    """The request of a line that has no problem."""

    number: int
    custom_id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckedInput:
    """What the lines of a file are: how many, for which model, and their problems, at most `MAX_PROBLEMS` of them."""

    num_lines: int
    model: str | None
    problems: tuple[LineProblem, ...]


async def lines_of(file: BinaryIO) -> AsyncGenerator[InputLine]:
    """Yields the lines of an open file that are not empty. A line that is too long is cut after `MAX_LINE_BYTES` + 1."""
    number = 0
    while pieces := await asyncio.to_thread(_read_some, file):
        for piece in pieces:
            number += 1
            if raw := (piece.removeprefix(_BOM) if number == 1 else piece).strip():
                yield InputLine(number, raw)


def _read_some(file: BinaryIO) -> list[bytes]:
    found: list[bytes] = []
    num_bytes = 0
    while len(found) < _LINES_PER_READ and num_bytes < _BYTES_PER_READ:
        line = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            break
        rest = line
        while rest and not rest.endswith(b"\n"):  # the rest of a line that is too long
            rest = file.readline(MAX_LINE_BYTES + 1)
        found.append(line)
        num_bytes += len(line)
    return found


async def read_request(line: InputLine, endpoint: str, parse_long: ParseLong) -> LineRequest | LineProblem:
    """Returns the request of a line, or the first thing that is wrong with it."""

    def wrong(code: str, message: str, param: str | None = None) -> LineProblem:
        return LineProblem(code, message, line.number, param)

    if len(line.raw) > MAX_LINE_BYTES:
        return wrong("line_too_long", f"This line has more than {MAX_LINE_BYTES} bytes.")
    try:
        value = parse_json(line.raw) if len(line.raw) <= LONG_LINE_BYTES else await parse_long(line.raw)
    except InvalidRequest as error:
        return wrong("invalid_json_line", f"This line is not parseable as valid JSON. {error.message}")
    if not isinstance(value, dict):
        return wrong("invalid_json_line", "This line is no JSON object.")
    for name in ("custom_id", "method", "url", "body"):
        if name not in value:
            return wrong("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
    custom_id, body = value["custom_id"], value["body"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        return wrong("invalid_custom_id", f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters.", "custom_id")
    if value["method"] != "POST":
        return wrong("invalid_method", "method must be 'POST'.", "method")
    if value["url"] != endpoint:
        message = f"The URL provided for this request does not match the batch endpoint, {endpoint}."
        return wrong("mismatched_endpoint", message, "url")
    if not isinstance(body, dict):
        return wrong("invalid_body", "body must be a JSON object.", "body")
    return LineRequest(line.number, custom_id, body)


async def check_input(file: BinaryIO, endpoint: str, max_lines: int, parse_long: ParseLong) -> CheckedInput:
    """Reads a whole file, and finds what is wrong with it."""
    num_lines, model, problems, known = 0, None, list[LineProblem](), set[str]()
    async for line in lines_of(file):
        num_lines += 1
        if num_lines > max_lines:
            problems.append(LineProblem("too_many_requests", f"The file has more than {max_lines} requests: split it."))
            break
        found = await read_request(line, endpoint, parse_long)
        if isinstance(found, LineRequest) and found.custom_id in known:
            message = "The custom_id for this request is a duplicate of another request's: each line needs its own."
            found = LineProblem("duplicate_custom_id", message, line.number, "custom_id")
        if isinstance(found, LineProblem):
            problems.append(found)
            if len(problems) >= MAX_PROBLEMS:
                break
            continue
        known.add(found.custom_id)
        if model is None and isinstance(found.body.get("model"), str):
            model = found.body["model"][:400]
    if not num_lines:
        problems.append(LineProblem("empty_file", "The file has no requests: send one JSON object a line."))
    return CheckedInput(num_lines, model, tuple(problems))
