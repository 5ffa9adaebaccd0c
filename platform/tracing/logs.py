"""Writes the log of a process: one line for each record, as JSON for programs or as text for people.

Owns the form of a line, the choice between the two forms, and the log of token ids, which is a file of its own. Never
sees a prompt. No other module should log an API key. If one does, this module still masks the text that looks like a
key.
Invariant: a record is one line, whatever its texts contain.
"""

import json
import logging
import logging.handlers
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from graftwork.platform.environment import wants_colours

__all__ = ["JsonFormatter", "TextFormatter", "configure_logging", "configure_token_log"]

TOKEN_LOGGER = "graftwork.token_ids"
"""The logger of token ids. It writes nowhere until `configure_token_log` is called."""

_TOKEN_LOG_BYTES = 16 * 2**20
_OWN = "graftwork"
"""The logger of all our own modules."""
_NOISY = ("alembic.runtime.plugins",)
"""The loggers of libraries whose lines below a warning tell an operator nothing."""
_KEY = re.compile(r"\b((?:gwc_)?gwa?_[0-9A-Za-z]+)_[0-9A-Za-z]{16,}(?:_[0-9]+_[0-9]+_[0-9a-f]+)?")
_encode = json.JSONEncoder(default=str, ensure_ascii=False).encode
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_COLOURS = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "1;31"}
"""By level, the codes of its colour in a terminal."""
_REQUEST_FIRST = ("method", "path", "status", "seconds")
"""The fields of a request's line that stand first, without their names."""


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Returns the fields that were given as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _OWN_FIELDS}


class JsonFormatter(logging.Formatter):
    """Writes a log record as one line of JSON: time, level, logger and event, then the fields given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= _fields_of(record)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return redact(_encode(line))


class TextFormatter(logging.Formatter):
    """Writes a log record as one line for people: the local time, the level, the event, then `name=value` for each field.

    A traceback follows on lines of its own. Control characters are escaped, so no text can pretend to be a line.
    """

    def __init__(self, *, colours: bool = False) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        fields, level = _fields_of(record), record.levelname.lower()
        head = [fields.pop(name) for name in _REQUEST_FIRST if name in fields and record.getMessage() == "request"]
        at = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        event = " ".join([_shown(record.getMessage()), *(_shown(value) for value in head)])
        rest = "  ".join(f"{self._paint(name, '2')}={_shown(value)}" for name, value in fields.items())
        line = (
            f"{self._paint(at, '2')} {self._paint(f'{level:<8}', _COLOURS.get(level, '0'))} {event:<44} {rest}".rstrip()
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return redact(line)

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colours else text


def _shown(value: object) -> str:
    """Returns a value as text without control characters and, if it has blanks, in quotes."""
    if isinstance(value, Mapping):
        return ",".join(f"{_shown(name)}:{_shown(one)}" for name, one in value.items()) or "–"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if not text.isprintable():
        return json.dumps(text, ensure_ascii=True)
    return f'"{text}"' if " " in text and "=" in text else text


def redact(text: str) -> str:
    """Returns `text`, with `…` in place of the secret part of every API key in it."""
    return _KEY.sub(r"\1_…", text) if "gw" in text else text  # the expression is slow, and every line comes here


def configure_logging(level: str, stream: TextIO | None = None, form: str = "json") -> None:
    """Makes all loggers of the process write to `stream`, by default stderr. `level` is the lowest level that is written.

    Libraries write nothing below info, whatever the level is: at debug, drivers of databases log the values of their
    statements, and those are prompts and answers.

    `form` is `json`, `text`, or `auto`: text if the stream is a terminal, JSON elsewhere. Text has colours at a terminal,
    unless the variable NO_COLOR is set.
    """
    stream = stream or sys.stderr
    is_terminal = stream.isatty()
    handler = logging.StreamHandler(stream)
    as_text = form == "text" or (form == "auto" and is_terminal)
    colours = is_terminal and wants_colours()
    handler.setFormatter(TextFormatter(colours=colours) if as_text else JsonFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    logging.getLogger(_OWN).setLevel(level.upper())
    root.setLevel(max(logging.getLogger(_OWN).level, logging.INFO))
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))


def configure_token_log(path: Path) -> None:
    """Makes the log of token ids write JSON lines to `path`, which only this user can read. The file is made when the
    first line is written, and replaced at 16 MiB; the one before it is kept as `path.1`.
    """
    logger = logging.getLogger(TOKEN_LOGGER)
    for handler in logger.handlers:
        handler.close()
    handler = _PrivateFile(path, maxBytes=_TOKEN_LOG_BYTES, backupCount=1, delay=True, encoding="utf-8")
    handler.setFormatter(JsonFormatter())
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """A log file that only its owner can read."""

    def _open(self) -> Any:
        os.close(os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        return super()._open()
