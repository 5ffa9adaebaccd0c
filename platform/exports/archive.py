"""Writes the archive of an export: a ZIP file with a manifest of digests.

    tables/<section>.jsonl         one row in JSON a line
    adapters/<digest>/…            the two files of each adapter version
    files/<file id>                what was uploaded, and the output of batches
    manifest.json                  last: the digest, bytes and rows of each file above, and what is left out and why

Owns the form. Never reads the database. Everything is written once, from front to back, so memory holds one piece.
Every call blocks its thread, and only one thread may call at a time.
"""

import hashlib
import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any, BinaryIO, Protocol, cast

FORMAT = "graftwork-export-1"
MANIFEST = "manifest.json"
_PIECE_BYTES = 1024 * 1024
_LEVEL = 1
"""JSON shrinks to about a fifth at the fastest level, and slower ones gain little."""
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""Writes ASCII, in which every string that JSON can hold is exact."""


class Sink(Protocol):
    """Where the bytes of the archive go."""

    def write(self, piece: bytes) -> None: ...


@dataclass(slots=True)
class Member:
    """One file of the archive, as the manifest names it."""

    name: str
    sha256: str
    size_bytes: int
    rows: int | None
    """None for a file that is no table."""


class _CountedSink:
    """A file for `zipfile` that cannot seek. It hashes and counts what goes through it."""

    def __init__(self, sink: Sink) -> None:
        self._sink: Sink | None = sink
        self.sha256 = hashlib.sha256()
        self.size_bytes = 0

    def write(self, piece: bytes) -> int:
        if self._sink is not None:
            self._sink.write(piece)
        self.sha256.update(piece)
        self.size_bytes += len(piece)
        return len(piece)

    def flush(self) -> None:
        """Does nothing: the owner of the sink makes it durable."""

    def abandon(self) -> None:
        """Drops what is written from now on."""
        self._sink = None


class _OpenMember:
    """A file of the archive that is being written."""

    def __init__(self, file: IO[bytes], name: str, rows: int | None) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self._name = name
        self._size_bytes = 0
        self.rows = rows

    def write(self, piece: bytes) -> None:
        self._file.write(piece)
        self._sha256.update(piece)
        self._size_bytes += len(piece)

    def close(self) -> Member:
        self._file.close()
        return Member(self._name, self._sha256.hexdigest(), self._size_bytes, self.rows)


class ArchiveWriter:
    """Writes one archive. The caller ends it with `close`, or with `abandon` after an error."""

    def __init__(self, sink: Sink) -> None:
        self._out = _CountedSink(sink)
        # zipfile needs write and flush alone of a file in which it cannot seek
        self._zip = zipfile.ZipFile(cast(IO[bytes], self._out), "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL)
        self._members: list[Member] = []
        self._open: _OpenMember | None = None

    @property
    def rows(self) -> int:
        """The rows of all tables so far."""
        members: list[Member | _OpenMember] = [*self._members, *([self._open] if self._open else [])]
        return sum(member.rows or 0 for member in members)

    @property
    def size_bytes(self) -> int:
        return self._out.size_bytes

    @property
    def sha256(self) -> str:
        """The digest of all bytes so far: after `close`, of the whole archive."""
        return self._out.sha256.hexdigest()

    def begin_table(self, name: str) -> None:
        """Begins the file of a table. `end` ends it."""
        name = f"tables/{name}"
        self._open = _OpenMember(self._zip.open(name, "w", force_zip64=True), name, 0)

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds rows to the table that is open."""
        assert self._open is not None
        for row in rows:
            self._open.write(_encode(row).encode() + b"\n")
            self._open.rows = (self._open.rows or 0) + 1

    def end(self) -> None:
        """Ends the file that is open."""
        assert self._open is not None
        self._members.append(self._open.close())
        self._open = None

    def add_file(self, name: str, source: BinaryIO, *, compress: bool) -> None:
        """Copies an open file into the archive. Weights do not become smaller, so they need no compression."""
        info: zipfile.ZipInfo | str = name if compress else zipfile.ZipInfo(name)
        self._open = _OpenMember(self._zip.open(info, "w", force_zip64=True), name, None)
        while piece := source.read(_PIECE_BYTES):
            self._open.write(piece)
        self.end()

    def close(self, about: Mapping[str, Any]) -> None:
        """Writes the manifest, which begins with the fields of `about`, and ends the archive."""
        manifest = {"format": FORMAT, **about, "files": [asdict(member) for member in self._members]}
        self._zip.writestr(MANIFEST, json.dumps(manifest, indent=1) + "\n")
        self._zip.close()

    def abandon(self) -> None:
        """Ends an archive that nobody will read. Writes nothing more."""
        self._out.abandon()
        if self._open is not None:
            self._open.close()
        self._zip.close()
