"""Implements the file operations of the disk store.

LocalFiles runs them on a folder. FaultTolerantFiles counts errors of the file system instead of raising them. The
process may be killed between any two operations.
"""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from graftwork.engine.kv.disk.index import DiskMonitor
from graftwork.platform.errors import InvalidRequest

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The name, the size and the time of last use of one file in the disk store's folder."""

    name: str
    num_bytes: int
    used_at_ns: int
    """The time of last use, in nanoseconds since the Unix epoch. It is stored as the file's modification time."""


class FileSystem(Protocol):
    """The file operations of one folder. Every operation may raise OSError."""

    def entries(self) -> list[FileEntry]:
        """Returns the name, size and time of last use of each regular file in the folder."""
        ...

    def create(self, name: str, contents: Sequence[Buffer], used_at_ns: int) -> None:
        """Writes a new file, sets its time of last use and syncs its content to disk.

        If this fails, an incomplete file may remain. The caller must remove it.
        """
        ...

    def rename(self, name: str, new_name: str) -> None: ...

    def remove(self, name: str) -> None:
        """Removes a file. A missing file is not an error."""
        ...

    def read(self, name: str, offset: int, into: memoryview) -> int:
        """Reads bytes of a file into `into`, starting at `offset` in the file.

        Returns the number of bytes that were read. It is less than the size of `into` if the file ends before.
        """
        ...

    def stamp(self, name: str, used_at_ns: int) -> None:
        """Sets the time of a file's last use, in nanoseconds since the Unix epoch."""
        ...

    def sync(self) -> None:
        """Makes new file names in the folder survive a crash (fsync of the folder)."""
        ...


class LocalFiles:
    """Implements FileSystem on a folder of the local disk. Only the folder's user may read its files, because KV pages
    reveal prompts and answers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def entries(self) -> list[FileEntry]:
        with os.scandir(self._folder) as listing:
            return [found for entry in listing if (found := _file_entry(entry)) is not None]

    def create(self, name: str, contents: Sequence[Buffer], used_at_ns: int) -> None:
        descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for content in contents:
                file.write(content)
            file.flush()
            os.utime(file.fileno(), ns=(used_at_ns, used_at_ns))
            os.fsync(file.fileno())

    def rename(self, name: str, new_name: str) -> None:
        (self._folder / name).rename(self._folder / new_name)

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def read(self, name: str, offset: int, into: memoryview) -> int:
        done = 0
        with (self._folder / name).open("rb", buffering=0) as file:
            file.seek(offset)
            while done < len(into) and (count := file.readinto(into[done:])):
                done += count
        return done

    def stamp(self, name: str, used_at_ns: int) -> None:
        os.utime(self._folder / name, ns=(used_at_ns, used_at_ns))

    def sync(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _file_entry(entry: "os.DirEntry[str]") -> FileEntry | None:
    """Returns the size and the time of a file; None if it is not a regular file or no longer exists."""
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return FileEntry(entry.name, status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


DRAFT_SUFFIX = ".part"
"""The end of the name of a file that is not complete yet."""


class FaultTolerantFiles:
    """Runs the operations of a FileSystem. If an operation fails, counts the failure and returns a result that says so.

    Only `entries` raises an error.
    """

    def __init__(self, files: FileSystem, monitor: DiskMonitor) -> None:
        self._files = files
        self._monitor = monitor

    def entries(self) -> list[FileEntry]:
        """Returns the name, size and time of last use of each regular file in the folder.

        Raises InvalidRequest if the folder cannot be listed, because the store must know the size of the files in it.
        """
        try:
            return self._files.entries()
        except OSError as error:
            raise InvalidRequest(f"The folder for KV pages cannot be listed: {error.strerror}.") from error

    def put(self, name: str, contents: Sequence[Buffer], used_at_ns: int) -> bool:
        """Writes a file under a temporary name and renames it when it is complete. Returns whether this succeeded."""
        draft = name + DRAFT_SUFFIX
        try:
            self._files.create(draft, contents, used_at_ns)
            self._files.rename(draft, name)
        except OSError as error:
            self._monitor.record_failure(name, error)
            return False
        return True

    def remove_partial(self, name: str) -> bool:
        """Removes the incomplete file that a failed `put` may have left. Returns whether that file is gone."""
        return self.remove(name + DRAFT_SUFFIX) and self.remove(name)

    def remove(self, name: str) -> bool:
        """Removes a file. Returns whether the file is gone; this is also true for a missing file."""
        try:
            self._files.remove(name)
        except OSError as error:
            self._monitor.record_failure(name, error)
            return False
        return True

    def read(self, name: str, offset: int, into: memoryview) -> int | None:
        """Reads bytes of a file into `into`, starting at `offset` in the file.

        Returns the number of bytes that were read: 0 for a missing file, None if the disk failed.
        """
        try:
            return self._files.read(name, offset, into)
        except FileNotFoundError:
            return 0
        except OSError as error:
            self._monitor.record_failure(name, error)
            return None

    def stamp(self, name: str, used_at_ns: int) -> None:
        """Sets the time of a file's last use, in nanoseconds since the Unix epoch. A missing file is not an error."""
        try:
            self._files.stamp(name, used_at_ns)
        except FileNotFoundError:
            return
        except OSError as error:
            self._monitor.record_failure(name, error)

    def sync(self) -> None:
        try:
            self._files.sync()
        except OSError as error:
            self._monitor.record_failure("the folder", error)
