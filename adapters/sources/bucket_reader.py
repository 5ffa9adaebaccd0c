"""Reads adapters from buckets: S3 and what speaks its protocol.

Credentials and the endpoint come from the environment, as the provider's own tools read them. They are the operator's, so
tenants reach only the buckets that the operator names (SourceRules).
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from graftwork.adapters.sources.remote_file import RemoteFile, refused, unavailable
from graftwork.adapters.sources.source import AdapterSource
from graftwork.platform.errors import Unavailable
from graftwork.platform.outbound.buckets import BucketTimes, open_object_store

if TYPE_CHECKING:
    from obstore import GetResult

_CHUNK_BYTES = 2**20
_TIMES = BucketTimes(attempt_s=30.0, retry_for_s=10.0)


class BucketReader:
    """Reads the files of sources in buckets."""

    @asynccontextmanager
    async def open(self, source: AdapterSource, path: str) -> AsyncGenerator[RemoteFile]:
        """Opens one object. Raises ValidationFailed and Unavailable."""
        if find_spec("obstore") is None:
            raise Unavailable("This server lacks the library for buckets: pip install 'graftwork[objects]'.")
        import obstore
        from obstore.exceptions import BaseError

        try:
            found = await obstore.get_async(open_object_store(f"s3://{source.place}", _TIMES), path)
        except FileNotFoundError:
            raise refused(source, f"has no {path.rpartition('/')[2]}") from None
        except PermissionError:
            raise refused(source, "may not be read by this server") from None
        except (BaseError, OSError, ValueError) as error:
            raise unavailable(source, type(error).__name__) from error
        yield RemoteFile(found.meta["size"], source, _chunks(source, found))


async def _chunks(source: AdapterSource, found: "GetResult") -> AsyncIterator[bytes]:
    from obstore.exceptions import BaseError

    try:
        async for chunk in found.stream(min_chunk_size=_CHUNK_BYTES):
            yield bytes(chunk)
    except (BaseError, OSError) as error:
        raise unavailable(source, f"its connection broke ({type(error).__name__})") from error
