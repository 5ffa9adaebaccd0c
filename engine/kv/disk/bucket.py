"""Reads and writes the objects of a bucket: S3 and what speaks its protocol, Google Cloud Storage, Azure, or a folder.

Owns the client with its time limits. Credentials come from the environment, as the provider's own tools read them.
Invariant: every fault of the store or of the network is an OSError, after at most `_RETRY_FOR_S` and one last attempt.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from graftwork.engine.kv.disk.files import FileEntry
from graftwork.platform.errors import InvalidRequest

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az", "file")
_CONNECT_S = 2.0
_READ_S = 5.0
"""The longest time for one attempt to list or to read, for which requests wait."""
_WRITE_S = 30.0
"""The same for a write or a removal, which nobody waits for."""
_RETRY_FOR_S = 3.0
"""After so many seconds a failed operation is not attempted again."""
_NS = 1e9

_Result = TypeVar("_Result")


def check_bucket_url(url: str) -> None:
    """Raises InvalidRequest if a URL names no bucket, or if the library for buckets is missing."""
    parts = urlsplit(url)
    named = parts.path if parts.scheme == "file" else parts.netloc
    if parts.scheme not in SCHEMES or not named.strip("/"):
        raise InvalidRequest(
            f"--kv-object-url {url!r} names no bucket: write s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER.",
            param="kv_object_url",
        )
    if find_spec("obstore") is None:
        raise InvalidRequest(
            "--kv-object-url needs the library obstore: pip install 'graftwork[objects]'.", param="kv_object_url"
        )


class Bucket:
    """The objects whose names begin with a prefix of one bucket. Any thread may use it; all methods wait."""

    def __init__(self, url: str) -> None:
        """Raises InvalidRequest if the URL names no bucket. Connects to nothing yet."""
        check_bucket_url(url)
        self._store = _open_store(url, _READ_S)
        self._slow_store = _open_store(url, _WRITE_S)

    def entries(self, folder: str) -> list[FileEntry]:
        """Returns all objects whose names begin with `folder` and a slash. Raises OSError."""
        import obstore

        with _faults_as_os_errors():
            found = [one for chunk in obstore.list(self._store, prefix=folder) for one in chunk]
        return [FileEntry(one["path"], one["size"], int(one["last_modified"].timestamp() * _NS)) for one in found]

    def folders(self) -> list[str]:
        """Returns the first parts of all names. Raises OSError."""
        import obstore

        with _faults_as_os_errors():
            return list(obstore.list_with_delimiter(self._store)["common_prefixes"])

    def put(self, name: str, content: bytes) -> None:
        """Writes an object, whole or not at all. Raises OSError."""
        import obstore

        with _faults_as_os_errors():
            obstore.put(self._slow_store, name, content, use_multipart=False)

    def read(self, name: str, offset: int, into: memoryview) -> int:
        """Reads bytes of an object, from `offset` on. Returns how many there were. Raises OSError, for a missing object
        FileNotFoundError.
        """
        import obstore

        with _faults_as_os_errors():
            content = memoryview(obstore.get_range(self._store, name, start=offset, length=len(into)))
        count = min(len(content), len(into))
        into[:count] = content[:count]
        return count

    def remove(self, names: Sequence[str]) -> None:
        """Removes objects; missing ones are no error. Raises OSError."""
        import obstore

        with _faults_as_os_errors():
            try:
                obstore.delete(self._slow_store, names)  # many by one request
            except FileNotFoundError:
                for name in names:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._slow_store, name)


def _open_store(url: str, attempt_s: float) -> "ObjectStore":
    from obstore.store import LocalStore, from_url

    parts = urlsplit(url)
    if parts.scheme == "file":
        return LocalStore(parts.path, mkdir=True)
    with _faults_as_os_errors():
        return from_url(
            url,
            client_options={
                "connect_timeout": timedelta(seconds=_CONNECT_S),
                "timeout": timedelta(seconds=attempt_s),
                "allow_http": True,  # a store in the same cluster; the endpoint's URL says whether it has TLS
            },
            retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=_RETRY_FOR_S)},
        )


@contextmanager
def _faults_as_os_errors() -> Iterator[None]:
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, ValueError) as error:
        raise OSError(str(error).splitlines()[0]) from error


def attempt(action: Callable[[], _Result], on_failure: Callable[[OSError], None]) -> _Result | None:
    """Returns what `action` returns. If it raises OSError, calls `on_failure` and returns None."""
    try:
        return action()
    except OSError as error:
        on_failure(error)
        return None
