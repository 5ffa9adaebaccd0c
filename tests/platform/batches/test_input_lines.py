"""Tests of the lines of a batch's input file."""

import io
import json
from typing import Any

import pytest

from graftwork.platform.batches.input_lines import (
    LONG_LINE_BYTES,
    MAX_LINE_BYTES,
    MAX_PROBLEMS,
    CheckedInput,
    check_input,
    lines_of,
)
from graftwork.platform.strict_json import parse_json

ENDPOINT = "/v1/completions"
GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": {"model": "tiny"}}


async def parse_long(raw: bytes) -> Any:
    assert len(raw) > LONG_LINE_BYTES
    return parse_json(raw)


async def check(content: bytes, max_lines: int = 1000) -> CheckedInput:
    return await check_input(io.BytesIO(content), ENDPOINT, max_lines, parse_long)


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        ("{", "invalid_json_line", None),
        ('{"a": NaN}', "invalid_json_line", None),
        ("[]", "invalid_json_line", None),
        ('"\\ud800"', "invalid_json_line", None),
        ({"custom_id": "a"}, "missing_required_parameter", "method"),
        (GOOD | {"custom_id": ""}, "invalid_custom_id", "custom_id"),
        (GOOD | {"custom_id": 7}, "invalid_custom_id", "custom_id"),
        (GOOD | {"custom_id": "x" * 513}, "invalid_custom_id", "custom_id"),
        (GOOD | {"method": "GET"}, "invalid_method", "method"),
        (GOOD | {"url": "/v1/chat/completions"}, "mismatched_endpoint", "url"),
        (GOOD | {"body": []}, "invalid_body", "body"),
    ],
)
async def test_a_wrong_line_is_named(line: Any, code: str, param: str | None) -> None:
    """Each rule of a line has a code, and the problem names the line and the field."""
    raw = line if isinstance(line, str) else json.dumps(line)
    first = json.dumps(GOOD | {"custom_id": "first"})

    checked = await check(f"{first}\n{raw}\n".encode())

    (problem,) = checked.problems
    assert (problem.code, problem.line, problem.param) == (code, 2, param)


async def test_a_custom_id_occurs_once() -> None:
    """The second line with a custom_id is the wrong one."""
    checked = await check(b"\n".join(json.dumps(GOOD).encode() for _ in range(2)))

    assert [(one.code, one.line) for one in checked.problems] == [("duplicate_custom_id", 2)]


async def test_a_good_file() -> None:
    """Empty lines, a byte order mark and Windows' line ends are fine, and the first model is the file's."""
    lines = [json.dumps(GOOD | {"custom_id": one}) for one in ("a", "b")]

    checked = await check(("\ufeff" + "\r\n\r\n".join(lines) + "\r\n").encode())

    assert checked == CheckedInput(2, "tiny", ())


@pytest.mark.parametrize("content", [b"", b"\n \r\n"])
async def test_an_empty_file(content: bytes) -> None:
    """A file without requests is refused."""
    assert [one.code for one in (await check(content)).problems] == ["empty_file"]


async def test_too_many_lines() -> None:
    """A file with one line too many is refused, and not read any further."""
    lines = b"\n".join(json.dumps(GOOD | {"custom_id": f"{number}"}).encode() for number in range(4))

    assert (await check(lines, max_lines=4)).problems == ()
    assert [one.code for one in (await check(lines, max_lines=3)).problems] == ["too_many_requests"]


async def test_problems_are_bounded() -> None:
    """A file of nothing but wrong lines gets a bounded list."""
    assert len((await check(b"{\n" * 1000)).problems) == MAX_PROBLEMS


async def test_long_lines() -> None:
    """A long line is parsed elsewhere; one above the limit is refused, and the lines after it keep their numbers."""
    long = json.dumps(GOOD | {"custom_id": "long", "body": {"model": "tiny", "prompt": "x" * LONG_LINE_BYTES}})
    too_long = b'{"custom_id": "' + b"x" * (2 * MAX_LINE_BYTES) + b'"}'
    content = b"\n".join((long.encode(), too_long, json.dumps(GOOD).encode()))

    checked = await check(content)
    numbers = [line.number async for line in lines_of(io.BytesIO(content))]

    assert [(one.code, one.line) for one in checked.problems] == [("line_too_long", 2)]
    assert numbers == [1, 2, 3]
