"""Writes the usage of single requests as CSV, as lines of JSON, or as Parquet, a page at a time.

Owns the three forms. Amounts are decimals: text in CSV and JSON, `decimal128(19, 12)` in Parquet. Never reads the ledger.
Invariant: memory holds one page, however long the export is.
"""

import csv
import io
import json
from collections.abc import Sequence
from enum import StrEnum
from typing import IO, Any, Protocol

from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ledger.upkeep.export_rows import COLUMNS
from graftwork.platform.prices.rates import amount_text, from_atoms

_NAMES = (*COLUMNS, "cost", "currency")
_TEXTS = frozenset(
    {
        "tenant_id",
        "request_id",
        "key_id",
        "model",
        "adapter",
        "session_id",
        "outcome",
        "day",
        "service_tier",
        "price_id",
        "organisation_id",
        "end_user_id",
        "batch_id",
        "currency",
    }
)


class ExportForm(StrEnum):
    """How the requests are written."""

    CSV = "csv"
    JSON = "json"
    """One JSON object a line."""
    PARQUET = "parquet"


class RowWriter(Protocol):
    """Writes rows of the ledger, as `read_page` returns them."""

    def write(self, rows: Sequence[dict[str, Any]]) -> None: ...

    def close(self) -> None:
        """Writes what is left. The file stays open."""
        ...


def open_writer(form: ExportForm, file: IO[bytes]) -> RowWriter:
    """Returns a writer to an open file. Raises InvalidRequest if the form needs a package that is not installed."""
    if form is ExportForm.PARQUET:
        return _ParquetRows(file)
    return _CsvRows(file) if form is ExportForm.CSV else _JsonRows(file)


def _cost(row: dict[str, Any]) -> str | None:
    return None if row["currency"] is None else amount_text(from_atoms(row["cost_atoms"]))


class _CsvRows:
    def __init__(self, file: IO[bytes]) -> None:
        self._text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        self._csv = csv.writer(self._text, lineterminator="\n")
        self._csv.writerow(_NAMES)

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        self._csv.writerows([*(row[name] for name in COLUMNS), _cost(row), row["currency"]] for row in rows)

    def close(self) -> None:
        self._text.detach()


class _JsonRows:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            values = {name: row[name] for name in COLUMNS} | {"cost": _cost(row), "currency": row["currency"]}
            self._file.write(json.dumps(values, ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
        self._file.flush()


class _ParquetRows:
    """Each page becomes one row group."""

    def __init__(self, file: IO[bytes]) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise InvalidRequest(
                "Parquet needs the package pyarrow: pip install 'graftwork[parquet]', or choose csv or json.",
                param="format",
            ) from error
        self._arrow = pyarrow
        kinds = {"at": pyarrow.float64(), "cost": pyarrow.decimal128(19, 12)}
        text, number = pyarrow.string(), pyarrow.int64()
        fields = [(name, kinds.get(name) or (text if name in _TEXTS else number)) for name in _NAMES]
        self._schema = pyarrow.schema(fields)
        self._writer = pyarrow.parquet.ParquetWriter(file, self._schema, compression="zstd")

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        columns = {name: [row[name] for row in rows] for name in (*COLUMNS, "currency")}
        columns["cost"] = [None if row["currency"] is None else from_atoms(row["cost_atoms"]) for row in rows]
        self._writer.write_table(self._arrow.table(columns, schema=self._schema))

    def close(self) -> None:
        self._writer.close()
