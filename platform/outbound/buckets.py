"""Opens buckets: S3 and what speaks its protocol, Google Cloud Storage, Azure, or a folder that stands for one.

Owns the time limits of a client, and the library that this needs. Credentials and endpoints come from the environment, as
the provider's own tools read them. Never reads or writes an object.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from graftwork.platform.errors import InvalidRequest

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az", "file")


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """How long operations on a bucket may take, in seconds."""

    attempt_s: float
    """One attempt of an operation, or of a part of one."""
    retry_for_s: float
    """After so many seconds a failed operation is not attempted again."""
    connect_s: float = 5.0


def check_bucket_url(url: str, setting: str) -> None:
    """Raises InvalidRequest if the URL of a setting names no bucket, or if the library for buckets is missing."""
    flag, parts = "--" + setting.replace("_", "-"), urlsplit(url)
    named = parts.path if parts.scheme == "file" else parts.netloc
    if parts.scheme not in SCHEMES or not named.strip("/"):
        message = f"{flag} {url!r} names no bucket: write s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER."
        raise InvalidRequest(message, param=setting)
    if find_spec("obstore") is None:
        message = f"{flag} needs the library obstore: pip install 'graftwork[objects]'."
        raise InvalidRequest(message, param=setting)


def open_object_store(url: str, times: BucketTimes) -> "ObjectStore":
    """Returns a client for the objects below the URL. Connects to nothing yet. Raises OSError."""
    from obstore.store import LocalStore, from_url

    parts = urlsplit(url)
    if parts.scheme == "file":
        return LocalStore(parts.path, mkdir=True)
    with faults_as_os_errors():
        return from_url(
            url,
            client_options={
                "connect_timeout": timedelta(seconds=times.connect_s),
                "timeout": timedelta(seconds=times.attempt_s),
                "allow_http": True,  # a store in the same cluster; the endpoint's URL says whether it has TLS
            },
            retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=times.retry_for_s)},
        )


@contextmanager
def faults_as_os_errors() -> Generator[None]:
    """Converts the errors of a bucket to OSError; a missing object is a FileNotFoundError."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError:
        raise
    except (BaseError, ValueError) as error:
        raise OSError(str(error).splitlines()[0]) from error
