"""Says which columns of which tables hold what tenants say, and how an encrypted value is told from a plain one.

Owns the mark `CONTENT` and the two forms of encrypted values. Never reads, writes or encrypts a value.
"""

from dataclasses import dataclass
from functools import cache

from graftwork.platform.database import Base

CONTENT = {"content": True}
"""The `info` of a column that holds content: text, token ids, or JSON with text."""
SEALED_MARK = "gwrow1"
"""An encrypted value of a JSON column is a list: this mark, the number of characters of the plain JSON, and Base64.

No plain value of a column of content is a list that begins with a string.
"""
SEALED_PREFIX = b"GWR\xff"
"""What an encrypted value of a column of bytes begins with. Neither UTF-8 nor token ids begin so."""


@dataclass(frozen=True, slots=True)
class ContentColumn:
    """A column that holds content."""

    table: str
    name: str
    attribute: str
    """The name of the column in its class."""
    holds_bytes: bool
    """Whether the column holds bytes. Otherwise it holds JSON."""


@cache
def content_columns(table: type[Base]) -> tuple[ContentColumn, ...]:
    """Returns the columns of a table that hold content."""
    columns = [(one.key, one.columns[0]) for one in table.__mapper__.column_attrs]
    return tuple(
        ContentColumn(table.__tablename__, str(column.name), attribute, column.type.python_type is bytes)
        for attribute, column in columns
        if column.info.get("content")
    )


@cache
def key_columns(table: type[Base]) -> tuple[str, ...]:
    """Returns the names of a table's primary key columns, in their order."""
    return tuple(str(column.name) for column in table.__mapper__.primary_key)


def is_sealed(stored: object) -> bool:
    """Returns whether a stored value of a column of content is encrypted."""
    if isinstance(stored, bytes):
        return stored.startswith(SEALED_PREFIX)
    return isinstance(stored, list) and stored[:1] == [SEALED_MARK]
