"""What the readers of sources have in common: one file of a source, and the two ways in which fetching fails.

A source that has not what it should is a ValidationFailed, and fetching it again is no use. A source that does not answer,
or not to the end, is an Unavailable, and is tried again.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from graftwork.adapters.sources.source import AdapterSource
from graftwork.platform.errors import Unavailable, ValidationFailed


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One open file of a source."""

    size: int | None
    """Its length in bytes, as the source says; None if it does not."""
    source: AdapterSource
    """The source at the commit from which this file comes, if it is on the Hub."""
    chunks: AsyncIterator[bytes]
    """The content. Raises Unavailable if the connection breaks."""


class SourceReader(Protocol):
    """Reads the files of one kind of source."""

    def open(self, source: AdapterSource, path: str) -> AbstractAsyncContextManager[RemoteFile]:
        """Opens the file `path` of the source. Raises ValidationFailed and Unavailable."""
        ...


def refused(source: AdapterSource, what: str) -> ValidationFailed:
    """Returns the error of a source that has not what it should. `what` goes on after the source's name."""
    return ValidationFailed(f"{source.shown} {what}.", param="source", code="source_refused")


def unavailable(source: AdapterSource, what: str) -> Unavailable:
    """Returns the error of a source that does not answer now. `what` says how."""
    return Unavailable(f"{source.shown} cannot be fetched now: {what}.", code="source_unavailable", retry_after_s=5.0)
