"""Reads and writes the objects of a bucket: S3 and what speaks its protocol, Google Cloud Storage, Azure, or a folder.

Owns the time limits.
Invariant: every fault of the store or of the network is an OSError, after at most `_RETRY_FOR_S` and one last attempt.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from graftwork.engine.kv.disk.files import FileEntry
from graftwork.platform.outbound.buckets import (
    BucketTimes,
    check_bucket_url,
    faults_as_os_errors,
    open_object_store,
)

_CONNECT_S = 2.0
_READ_S = 5.0
"""The longest time for one attempt to list or to read, for which requests wait."""
_WRITE_S = 30.0
"""The same for a write or a removal, which nobody waits for."""
_RETRY_FOR_S = 3.0
"""After so many seconds a failed operation is not attempted again."""
_NS = 1e9

_Result = TypeVar("_Result")


class Bucket:
    """The objects whose names begin with a prefix of one bucket. Any thread may use it; all methods wait."""

    def __init__(self, url: str) -> None:
        """Raises InvalidRequest if the URL names no bucket. Connects to nothing yet."""
        check_bucket_url(url, "kv_object_url")
        self._store = open_object_store(url, BucketTimes(_READ_S, _RETRY_FOR_S, _CONNECT_S))
        self._slow_store = open_object_store(url, BucketTimes(_WRITE_S, _RETRY_FOR_S, _CONNECT_S))

    def entries(self, folder: str) -> list[FileEntry]:
        """Returns all objects whose names begin with `folder` and a slash. Raises OSError."""
        import obstore

        with faults_as_os_errors():
            found = [one for chunk in obstore.list(self._store, prefix=folder) for one in chunk]
        return [FileEntry(one["path"], one["size"], int(one["last_modified"].timestamp() * _NS)) for one in found]

    def folders(self) -> list[str]:
        """Returns the first parts of all names. Raises OSError."""
        import obstore

        with faults_as_os_errors():
            return list(obstore.list_with_delimiter(self._store)["common_prefixes"])

    def put(self, name: str, content: bytes) -> None:
        """Writes an object, whole or not at all. Raises OSError."""
        import obstore

        with faults_as_os_errors():
            obstore.put(self._slow_store, name, content, use_multipart=False)

    def read(self, name: str, offset: int, into: memoryview) -> int:
        """Reads bytes of an object, from `offset` on. Returns how many there were. Raises OSError, for a missing object
        FileNotFoundError.
        """
        import obstore

        with faults_as_os_errors():
            content = memoryview(obstore.get_range(self._store, name, start=offset, length=len(into)))
        count = min(len(content), len(into))
        into[:count] = content[:count]
        return count

    def remove(self, names: Sequence[str]) -> None:
        """Removes objects; missing ones are no error. Raises OSError."""
        import obstore

        with faults_as_os_errors():
            try:
                obstore.delete(self._slow_store, names)  # many by one request
            except FileNotFoundError:
                for name in names:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._slow_store, name)


def attempt(action: Callable[[], _Result], on_failure: Callable[[OSError], None]) -> _Result | None:
    """Returns what `action` returns. If it raises OSError, calls `on_failure` and returns None."""
    try:
        return action()
    except OSError as error:
        on_failure(error)
        return None
