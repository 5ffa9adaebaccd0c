"""The few operations on files that the disk tier is made of, each of which can fail or be the last before a crash."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from graftwork.engine.kv.disk.counters import DiskMonitor
from graftwork.platform.errors import InvalidRequest

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the folder, as the folder lists it."""

    name: str
    num_bytes: int
    used_at_ns: int
    """The time of its last use, which is kept where files keep the time of their last change."""


class FileSystem(Protocol):
    """One folder of files; any operation may raise OSError."""

    def entries(self) -> list[FileEntry]:
        """Every ordinary file of the folder."""
        ...

    def create(self, name: str, contents: Sequence[Buffer], used_at_ns: int) -> None:
        """Write a file, stamp it and bring it to the disk. What is left after a failure is for the caller to remove."""
        ...

    def rename(self, name: str, new_name: str) -> None: ...

    def remove(self, name: str) -> None:
        """Remove a file; one that is gone already is no error."""
        ...

    def read(self, name: str, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset` on; returns how many bytes there were."""
        ...

    def stamp(self, name: str, used_at_ns: int) -> None:
        """Note when the file was last used."""
        ...

    def sync(self) -> None:
        """Bring the names in the folder to the disk."""
        ...


class LocalFiles:
    """A folder of the machine's own file system, readable by its domain alone: KV pages tell what was said."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def entries(self) -> list[FileEntry]:
        with os.scandir(self._folder) as listing:
            return [found for entry in listing if (found := _described(entry)) is not None]

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


def _described(entry: "os.DirEntry[str]") -> FileEntry | None:
    """None for what is no ordinary file, or is gone since it was listed."""
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return FileEntry(entry.name, status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


DRAFT_SUFFIX = ".part"
"""Behind the name of a file that is not yet whole."""


class FaultTolerantFiles:
    """A FileSystem that never raises OSError; only a folder that cannot be listed cannot be worked with."""

    def __init__(self, files: FileSystem, monitor: DiskMonitor) -> None:
        self._files = files
        self._monitor = monitor

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
            self._monitor.record_failure(name, error)
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
            self._monitor.record_failure(name, error)
            return False
        return True

    def read(self, name: str, offset: int, into: memoryview) -> int | None:
        """How many bytes of `into` could be filled, 0 where there is no such file; None if the disk refused."""
        try:
            return self._files.read(name, offset, into)
        except FileNotFoundError:
            return 0
        except OSError as error:
            self._monitor.record_failure(name, error)
            return None

    def stamp(self, name: str, used_at_ns: int) -> None:
        """Note when a file was last used, unless it is gone."""
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
