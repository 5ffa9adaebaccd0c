"""Tests of the log's lines."""

import io
import json
import logging
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from graftwork.platform.tracing.logs import (
    TOKEN_LOGGER,
    JsonFormatter,
    TextFormatter,
    configure_logging,
    configure_token_log,
)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, which is as it was after the test."""
    root = logging.getLogger()
    own = logging.getLogger("graftwork")
    handlers, level, own_level = root.handlers, root.level, own.level
    yield root
    root.handlers = handlers
    root.setLevel(level)
    own.setLevel(own_level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(message: str, **fields: object) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": message, "levelname": "INFO", "levelno": 20, "name": "graftwork.x", **fields})


REQUEST = {
    "request_id": "req_1",
    "method": "POST",
    "path": "/v1/chat/completions",
    "status": 200,
    "seconds": 0.25,
    "tenant_id": "ten_1",
    "tokens": {"device": 16, "completion": 6},
}


def test_a_log_line_is_one_object() -> None:
    """A log line is one JSON object with the event, the `extra` fields and the exception."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("graftwork.test")
    logger.addHandler(handler)

    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("turn %s failed", "trn_1", extra={"request_id": "req_1", "size": 3})
    finally:
        logger.removeHandler(handler)

    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    line = json.loads(lines[0])
    assert (line["level"], line["event"], line["request_id"], line["size"]) == (
        "error",
        "turn trn_1 failed",
        "req_1",
        3,
    )
    assert "ValueError: two\nlines" in line["error"]


def test_a_request_is_one_line_for_people() -> None:
    """The line of a request begins with method, path, status and seconds, then has the other fields by name."""
    line = TextFormatter().format(record("request", **REQUEST))

    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\.\d{3} info     request POST /v1/chat/completions 200 0\.25 +"
        r"request_id=req_1  tenant_id=ten_1  tokens=device:16,completion:6",
        line,
    )


@pytest.mark.parametrize("hostile", ["two\nlines", "\x1b[31mred", "right\u202eleft", "tab\there", "\x00"])
def test_text_cannot_break_a_line(hostile: str) -> None:
    """Control and direction characters of a name or a message are escaped, so a text is never a line or a colour."""
    line = TextFormatter().format(record(hostile, adapter=hostile, tokens={hostile: hostile}))

    assert line.isprintable()


def test_colours_only_paint() -> None:
    """Without its colours, a coloured line is the plain one."""
    one = record("request", **REQUEST)
    painted = TextFormatter(colours=True).format(one)

    assert "\x1b[" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == TextFormatter().format(one)


def test_keys_are_masked_in_both_forms() -> None:
    """A key that somebody logs loses its secret part."""
    one = record("key gw_abc123_0123456789abcdefXYZ", key="gwa_operator_0123456789abcdef")

    for formatter in (JsonFormatter(), TextFormatter()):
        line = formatter.format(one)
        assert "0123456789abcdef" not in line
        assert "gw_abc123_…" in line


@pytest.mark.parametrize(
    ("form", "stream", "is_json"),
    [
        ("auto", io.StringIO(), True),
        ("auto", Terminal(), False),
        ("json", Terminal(), True),
        ("text", io.StringIO(), False),
    ],
)
def test_the_form_follows_the_setting(form: str, stream: io.StringIO, is_json: bool, root: logging.Logger) -> None:
    """`auto` is text at a terminal and JSON elsewhere; the others insist."""
    configure_logging("info", stream, form)
    root.info("hello", extra={"size": 3})

    assert stream.getvalue().startswith("{") is is_json


def test_colours_are_for_terminals(root: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets no colours, nor does a terminal whose user wants none (https://no-color.org)."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        configure_logging("info", stream, "text")
        root.info("hello")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    configure_logging("info", plain, "text")
    root.info("hello")

    assert "\x1b[" in terminal.getvalue()
    assert "\x1b[" not in pipe.getvalue() + plain.getvalue()


def test_the_plugins_of_migrations_are_silent(root: logging.Logger) -> None:
    """A start of the server logs no line for each plugin that Alembic sets up; a warning passes."""
    stream = io.StringIO()
    configure_logging("info", stream)
    logger = logging.getLogger("alembic.runtime.plugins")
    logger.info("setup plugin")
    logger.warning("no such plugin")
    root.info("hello")

    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["no such plugin", "hello"]


def test_libraries_log_nothing_at_debug(root: logging.Logger) -> None:
    """At the level debug our own modules log all, and libraries from info on: theirs hold the values of statements."""
    stream = io.StringIO()
    configure_logging("debug", stream)

    for name in ("graftwork.sessions.service", "aiosqlite", "sqlalchemy.engine", "httpx"):
        logging.getLogger(name).debug("values of %s", name)
    logging.getLogger("some.library").info("a library tells")

    lines = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert lines == ["values of graftwork.sessions.service", "a library tells"]


def test_token_ids_have_a_file_of_their_own(tmp_path: Path, root: logging.Logger) -> None:
    """Token ids go to their file alone, which only its owner can read, and which is not there before the first line."""
    path, stream = tmp_path / "token-ids.log", io.StringIO()
    configure_logging("debug", stream)
    configure_token_log(path)
    logger = logging.getLogger(TOKEN_LOGGER)
    try:
        assert not path.exists()
        logger.info("token_ids", extra={"prompt_token_ids": [1, 2]})

        assert json.loads(path.read_text())["prompt_token_ids"] == [1, 2]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stream.getvalue() == ""
    finally:
        logger.handlers[0].close()
        logger.handlers.clear()
        logger.propagate = True
