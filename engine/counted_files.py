"""The disk tier's files, with every refusal of the file system counted and answered instead of raised."""

from collections.abc import Sequence

from graftwork.engine.disk_tally import DiskTally
from graftwork.engine.local_files import Buffer, FileEntry, FileSystem
from graftwork.platform.errors import InvalidRequest

DRAFT_SUFFIX = ".part"
"""Behind the name of a file that is not yet whole."""


class CountedFiles:
    """A FileSystem that never raises OSError; only a folder that cannot be listed cannot be worked with."""

    def __init__(self, files: FileSystem, tally: DiskTally) -> None:
        self._files = files
        self._tally = tally

    def entries(self) -> list[FileEntry]:
        """Every ordinary file. Raises InvalidRequest: without knowing what is there, no budget can be kept."""
        try:
            return self._files.entries()
        except OSError as error:
            raise InvalidRequest(f"The folder for KV pages cannot be listed: {error.strerror}.") from error

    def put(self, name: str, contents: Sequence[Buffer], used_at_ns: int) -> bool:
        """Write a file that appears under its name whole or not at all; False if it does not."""
        draft = name + DRAFT_SUFFIX
        try:
            self._files.create(draft, contents, used_at_ns)
            self._files.rename(draft, name)
        except OSError as error:
            self._tally.failed(name, error)
            return False
        return True

    def remove_remains(self, name: str) -> bool:
        """Remove what a failed `put` may have left; False if something stays."""
        return self.remove(name + DRAFT_SUFFIX) and self.remove(name)

    def remove(self, name: str) -> bool:
        """Whether the file is gone now."""
        try:
            self._files.remove(name)
        except OSError as error:
            self._tally.failed(name, error)
            return False
        return True

    def read(self, name: str, offset: int, into: memoryview) -> int | None:
        """How many bytes of `into` could be filled, 0 where there is no such file; None if the disk refused."""
        try:
            return self._files.read(name, offset, into)
        except FileNotFoundError:
            return 0
        except OSError as error:
            self._tally.failed(name, error)
            return None

    def stamp(self, name: str, used_at_ns: int) -> None:
        """Note when a file was last used, unless it is gone."""
        try:
            self._files.stamp(name, used_at_ns)
        except FileNotFoundError:
            return
        except OSError as error:
            self._tally.failed(name, error)

    def sync(self) -> None:
        try:
            self._files.sync()
        except OSError as error:
            self._tally.failed("the folder", error)
