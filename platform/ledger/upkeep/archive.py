"""Writes rows of the usage ledger to the files of an archive, before they are pruned.

    ARCHIVE/2026-11/TENANT-SECOND-DIGEST.csv.gz      rows of one tenant, from the time and the request that it names on

Owns the form and the names of the files. Reads nothing back: each file is a CSV with the ledger's column names.
Invariant: a file with its name is whole. Rows that are written again replace their own file.
"""

import csv
import gzip
import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path

from graftwork.platform.ledger.tables import UsageRow

_COLUMNS = tuple(UsageRow.__table__.columns.keys())


def write_rows(archive: Path, rows: Sequence[UsageRow]) -> Path:
    """Writes rows of one tenant to a file, and returns its path. Raises OSError if the disk is full or missing."""
    first = rows[0]
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(_COLUMNS)
    out.writerows([getattr(row, name) for name in _COLUMNS] for row in rows)
    folder = archive / first.day[:7]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    named = hashlib.sha256(first.request_id.encode()).hexdigest()[:16]  # a client may have chosen the id
    path = folder / f"{first.tenant_id}-{int(first.at)}-{named}.csv.gz"
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        file.write(gzip.compress(text.getvalue().encode(), compresslevel=6))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    return path
