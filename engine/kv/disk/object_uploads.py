"""Uploads files of KV pages to a bucket, one after the other on a thread of its own.

Owns the queue and the thread. Never decides which file is worth an upload. A queue that is full drops what comes: the
pages stay on the engine's own disk, and are offered again with the next pages of their session.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Full, Queue

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.kv.disk.file_format import PageFile
from graftwork.engine.kv.disk.index import DiskMonitor
from graftwork.engine.kv.disk.store import DiskStore

_log = logging.getLogger(__name__)

_MAX_QUEUED = 1024
_FLUSH_S = 20.0
"""The longest time for which the end of an engine waits for its uploads."""


@dataclass(frozen=True, slots=True)
class Upload:
    """One file of an engine's disk that shall be in the bucket."""

    own: DiskStore
    file: PageFile
    path: tuple[PageKey, ...]
    """The keys of the prompt that the pages belong to, first page first."""
    num_forgets: int
    """How many domains were forgotten when the upload was asked for."""


class ObjectUploads:
    """Calls `upload` for each file that was put, in their order. `put` never waits."""

    def __init__(self, upload: Callable[[Upload], None], monitor: DiskMonitor) -> None:
        self._upload = upload
        self._monitor = monitor
        self._queue: Queue[Upload | None] = Queue(_MAX_QUEUED)
        self._names: set[str] = set()
        """The files that are queued."""
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def put(self, upload: Upload) -> None:
        """Queues a file, unless it is queued already."""
        if self._is_closed or upload.file.name in self._names:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-uploads", daemon=True)
            self._thread.start()
        try:
            self._names.add(upload.file.name)
            self._queue.put_nowait(upload)
        except Full:
            self._names.discard(upload.file.name)
            self._monitor.add("object_dropped", upload.file.num_pages)

    def flush(self) -> None:
        """Returns when all files that are queued now were uploaded, or could not be."""
        self._queue.join()

    def close(self) -> None:
        """Uploads what is queued, for `_FLUSH_S` seconds at most, and ends the thread."""
        self._is_closed = True
        if self._thread is not None:
            with suppress(Full):
                self._queue.put(None, timeout=_FLUSH_S)
            self._thread.join(_FLUSH_S)

    def _run(self) -> None:
        while (upload := self._queue.get()) is not None:
            try:
                self._upload(upload)
            except Exception:  # noqa: BLE001 - the outermost loop of the thread: the next file may succeed
                _log.exception("kv_upload_failed")
            finally:
                self._names.discard(upload.file.name)
                self._queue.task_done()
        self._queue.task_done()
