"""Logs: one JSON object a line, without prompts and without keys.

Owns the form of a line. No code should log a key; as a second guard, text that looks like one is blacked out here.
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
    """A record as one line: time, level, logger, event, then the fields given as `extra`."""

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
    """`text`, with the secret part of every key in it blacked out."""
    return _KEY.sub(r"\1_…", text)


def configure_logging(level: str, stream: TextIO | None = None) -> None:
    """Send every logger of the process through one JSON handler. It writes to stderr by default."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
