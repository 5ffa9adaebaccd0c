"""Pages whose content follows from their key, and a folder that fails or crashes on demand."""

import errno
import hashlib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from graftwork.engine.core.prefix_keys import PageKey, child_key, root_key
from graftwork.engine.kv.disk.file_format import file_bytes
from graftwork.engine.kv.disk.files import Buffer, FileEntry, LocalFiles
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.platform.clock import ManualClock

PAGE_BYTES = 512
LAYOUT = hashlib.sha256(b"layout").digest()
OTHER_LAYOUT = hashlib.sha256(b"other layout").digest()
ONE_PAGE_FILE = file_bytes(1, PAGE_BYTES)


def quick_folder() -> TemporaryDirectory[str]:
    """Returns a folder in memory if there is one, because syncing thousands of files to a disk is slow."""
    memory = Path("/dev/shm")
    return TemporaryDirectory(dir=memory if memory.is_dir() else None)


class Crash(BaseException):
    """Stands for the end of the process. Only the test may catch it."""


class FaultyFiles(LocalFiles):
    """A folder whose operations fail or crash on demand. It records the largest number of bytes in the folder."""

    def __init__(self, folder: Path, written: set[bytes] | None = None) -> None:
        super().__init__(folder)
        self.folder = folder
        self.written = set() if written is None else written
        """Receives the content of every file that was written completely."""
        self.num_operations = 0
        self.crash_at: int | None = None
        """The number of the operation at which the process ends. A file is then half written."""
        self.refused: set[str] = set()
        """Operations that raise OSError."""
        self.most_bytes = 0

    def entries(self) -> list[FileEntry]:
        self._begin("entries")
        return super().entries()

    def create(self, name: str, contents: Sequence[Buffer], used_at_ns: int) -> None:
        half = b"".join(contents)[: sum(map(len, contents)) // 2]
        if self._is_last() or "create" in self.refused:
            super().create(name, [half], used_at_ns)
            self._watch()
        self._begin("create")
        super().create(name, contents, used_at_ns)
        self.written.add(b"".join(contents))
        self._watch()

    def rename(self, name: str, new_name: str) -> None:
        self._begin("rename")
        super().rename(name, new_name)

    def remove(self, name: str) -> None:
        self._begin("remove")
        super().remove(name)

    def read(self, name: str, offset: int, into: memoryview) -> int:
        self._begin("read")
        return super().read(name, offset, into)

    def stamp(self, name: str, used_at_ns: int) -> None:
        self._begin("stamp")
        super().stamp(name, used_at_ns)

    def sync(self) -> None:
        self._begin("sync")
        super().sync()

    def _is_last(self) -> bool:
        return self.num_operations == self.crash_at

    def _begin(self, operation: str) -> None:
        if self._is_last():
            raise Crash
        self.num_operations += 1
        if operation in self.refused:
            raise OSError(errno.ENOSPC, "No space left on device")

    def _watch(self) -> None:
        self.most_bytes = max(self.most_bytes, bytes_in(self.folder))


def bytes_in(folder: Path) -> int:
    """Returns the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


def domain_named(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def chain(scope: str, num_pages: int) -> list[PageKey]:
    """Returns the keys of the first pages of a scope. A longer chain starts with a shorter one."""
    keys = [root_key(scope.encode())]
    for number in range(num_pages):
        keys.append(child_key(keys[-1], [number]))
    return keys[1:]


def page_of(key: PageKey) -> bytes:
    """Returns the content that belongs to a key and to no other."""
    return hashlib.shake_128(key).digest(PAGE_BYTES)


def pages_of(keys: Sequence[PageKey]) -> list[bytes]:
    return [page_of(key) for key in keys]


def opened(folder: Path, max_bytes: int = 2**20, layout: bytes = LAYOUT, files: LocalFiles | None = None) -> DiskStore:
    """Returns an open disk store on a manual clock."""
    disk = DiskStore(folder, max_bytes, layout, files, ManualClock())
    disk.open()
    return disk


def store(disk: DiskStore, domain: str, keys: Sequence[PageKey]) -> int:
    return disk.write(domain_named(domain), keys, pages_of(keys))


def readable(disk: DiskStore, keys: Sequence[PageKey]) -> list[PageKey]:
    """Returns the keys whose pages can be read. Fails if a page has wrong bytes."""
    found = []
    for key in keys:
        space = bytearray(PAGE_BYTES)
        if disk.read(key, memoryview(space)):
            assert bytes(space) == page_of(key), "a page was answered with wrong bytes"
            found.append(key)
    return found
