"""Defines what a section of an export is: the rows that a tenant has in one table, as lines of JSON.

Each room declares the sections of its own tables. Never reads the database.
"""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from graftwork.platform.database import Base

Row = Mapping[str, Any]
"""The values of a row by the names of its columns."""


@dataclass(frozen=True, slots=True)
class Section:
    """The rows that a tenant has in one table."""

    name: str
    """The name of the file in the archive, without its ending, such as `sessions/items`."""
    table: type[Base]
    owner: str | None = "tenant_id"
    """The column that holds the tenant's id; None for a table without one, whose rows belong to those of `parent`."""
    parent: "Section | None" = None
    """The section of whose rows these are part. It is set for large tables without an index by tenant."""
    parent_column: str | None = None
    """The column that holds the primary key of the parent's row."""
    decoders: Mapping[str, Callable[[Any], Any]] = field(default_factory=lambda: MappingProxyType({}))
    """By column: makes a value of JSON from what the column holds. Other bytes become base64."""
    withheld: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The columns that are left out, with the reason for each."""

    @property
    def file(self) -> str:
        """The name of the section's file in the archive."""
        return f"{self.name}.jsonl"

    @property
    def key_columns(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.table.__mapper__.primary_key)

    def key_of(self, row: Row) -> tuple[Any, ...]:
        """Returns the primary key of a row."""
        return tuple(row[name] for name in self.key_columns)

    def shown(self, row: Row) -> dict[str, Any]:
        """Returns a row as a JSON object, without what is withheld."""
        return {name: self._value(name, value) for name, value in row.items() if name not in self.withheld}

    def _value(self, column: str, value: object) -> object:
        if value is None:
            return None
        if column in self.decoders:
            return self.decoders[column](value)
        return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def text_of(value: bytes) -> str:
    """Reads bytes that hold UTF-8 text."""
    return value.decode("utf-8", errors="replace")
