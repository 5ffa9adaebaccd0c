"""Writes logs: one JSON object per line, without prompts and without API keys.

Owns the form of a log line. No other module should log an API key. If one does, this module still masks the text that
looks like a key.
"""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

_KEY = re.compile(r"\b(gwa?_[0-9A-Za-z]+)_[0-9A-Za-z]{16,}")
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Writes a log record as one line of JSON: time, level, logger and event, then the fields given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _OWN_FIELDS}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return redact(json.dumps(line, default=str, ensure_ascii=False))


def redact(text: str) -> str:
    """Returns `text`, with `…` in place of the secret part of every API key in it."""
    return _KEY.sub(r"\1_…", text)


def configure_logging(level: str, stream: TextIO | None = None) -> None:
    """Makes all loggers of the process write JSON lines to `stream`, by default stderr. `level` is the lowest level
    that is written.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
