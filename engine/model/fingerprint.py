"""Lists the files of a model, and computes a fingerprint of their content.

Owns which files make up a model: config.json and the weight files. Never imports torch, because the gateway computes
fingerprints too.
"""

import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from io import FileIO
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from graftwork.platform.clock import Clock
from graftwork.platform.errors import InvalidRequest

_log = logging.getLogger(__name__)

_THREADS = 4
"""Files that are read at the same time. One thread hashes 0.5 to 2 GB a second."""
_BLOCK_BYTES = 1 << 24
"""A thread needs the interpreter's lock between two blocks: with small ones, it would wait for imports most of the time."""


_FORMAT = 1
_SETTLED_S = 2.0
"""A file that changed fewer seconds before it was hashed may change again within one tick of its file system's clock, so
that nothing shows it. Its digest is not kept."""


class KeptDigests:
    """The digests of a model's files that an earlier start has computed, in a file of its own.

    A digest is of the file that it was computed from as long as path, inode, size, and times of change are the same: every
    write changes the last of them. Anything else in the file of digests is ignored, and the model is hashed.
    """

    def __init__(self, folder: Path, model: Path, clock: Clock, *, renew: bool = False) -> None:
        """Reads the digests of `model` that `folder` has. With `renew`, none of them is used."""
        place = hashlib.sha256(os.fsencode(model.absolute())).hexdigest()[:32]
        self._clock = clock
        self._path = folder / f"digests-{place}.json"
        self._kept: Mapping[str, Any] = {}
        if not renew:
            with suppress(OSError, ValueError, KeyError, TypeError):
                stored = json.loads(self._path.read_text(encoding="utf-8"))
                self._kept = dict(stored["files"]) if stored["format"] == _FORMAT else {}

    def digest(self, path: Path, status: os.stat_result) -> bytes | None:
        """Returns the digest of a file in this status; None if it is not known."""
        kept = self._kept.get(str(path.absolute()))
        with suppress(KeyError, TypeError, ValueError):
            if kept is not None and kept["status"] == _identity(status):
                digest = bytes.fromhex(kept["sha256"])
                return digest if len(digest) == hashlib.sha256().digest_size else None
        return None

    def is_settled(self, status: os.stat_result) -> bool:
        """Returns whether a file has not changed for so long that its next change would show."""
        return status.st_ctime < self._clock.now() - _SETTLED_S

    def store(self, digests: Mapping[Path, tuple[bytes, os.stat_result]]) -> None:
        """Writes digests of files in the given status, in place of all others. Logs a warning if it cannot."""
        files = {
            str(path.absolute()): {"sha256": digest.hex(), "status": _identity(status)}
            for path, (digest, status) in digests.items()
        }
        if files == self._kept:
            return
        unfinished = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps({"format": _FORMAT, "files": files}, indent=1), encoding="utf-8")
            unfinished.replace(self._path)
        except OSError as error:
            _log.warning("digests_not_kept", extra={"path": str(self._path), "reason": str(error)})


class FingerprintReading:
    """Reads and hashes all files of a model on threads, so that a process can import its code meanwhile.

    What was read stays in the page cache, from which the weights are copied then. Files whose digest is kept are read for
    that alone, and are not hashed.
    """

    def __init__(self, folder: Path, kept: KeptDigests | None = None) -> None:
        """Begins to read. Raises InvalidRequest if a file is missing."""
        self._paths = [folder / "config.json", *weight_files(folder)]
        self._kept = kept
        self._digests = [Future[bytes]() for _ in self._paths]
        self._settled: dict[Path, tuple[bytes, os.stat_result]] = {}
        waiting = SimpleQueue[tuple[Path, Future[bytes]]]()
        for each in zip(self._paths, self._digests, strict=True):
            waiting.put(each)
        for _ in range(min(_THREADS, len(self._paths))):
            # daemons: a process that fails meanwhile ends at once
            threading.Thread(target=self._digest_all, args=(waiting,), name="fingerprint", daemon=True).start()

    def result(self, rounding: str | None = None) -> str:
        """Waits for the digests, keeps them, and returns the fingerprint (see `fingerprint`). Raises InvalidRequest if a file
        cannot be read.
        """
        digest = hashlib.sha256(b"graftwork/base/1")
        for path, own in zip(self._paths, self._digests, strict=True):
            try:
                digest.update(own.result())
            except OSError as error:
                raise InvalidRequest(f"{path} cannot be read: {error.strerror}.", param="model") from error
        if self._kept is not None:
            self._kept.store({path: self._settled[path] for path in self._paths if path in self._settled})
        if rounding is not None:
            digest.update(f"rounded to {rounding}".encode())
        return f"sha256:{digest.hexdigest()}"

    def _digest_all(self, waiting: "SimpleQueue[tuple[Path, Future[bytes]]]") -> None:
        """Digests the files of a queue until it is empty."""
        while not waiting.empty():
            try:
                path, found = waiting.get_nowait()
            except Empty:
                return  # another thread took the last one
            try:
                self._digest(path, found)
            except (OSError, MemoryError) as error:
                if not found.done():  # else the weights' own reading says what is wrong with the file
                    found.set_exception(error)

    def _digest(self, path: Path, found: "Future[bytes]") -> None:
        """Reads a file and tells its SHA-256: at once if it is kept, else when it is read."""
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            digest = None if self._kept is None else self._kept.digest(path, status)
            if digest is not None:
                self._settled[path] = (digest, status)
                found.set_result(digest)
                _read(file, None)
                return
            is_settled = self._kept is not None and self._kept.is_settled(status)
            hashed = hashlib.sha256()
            _read(file, hashed)
            if is_settled and _identity(status) == _identity(os.fstat(file.fileno())):
                self._settled[path] = (hashed.digest(), status)
            found.set_result(hashed.digest())


def fingerprint(folder: Path, rounding: str | None = None) -> str:
    """Returns `sha256:…`, a digest of the content of config.json and of all weight files.

    Equal models in different folders have the same fingerprint. Weights that are rounded when they are loaded make
    another model: `rounding` names to what, such as "int8". Raises InvalidRequest if a file is missing or cannot be
    read.
    """
    return FingerprintReading(folder).result(rounding)


def _identity(status: os.stat_result) -> list[int]:
    """What is another for another file, and after each change of a file."""
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read(file: FileIO, hashed: "hashlib._Hash | None") -> None:
    """Reads a whole file, and hashes it. The system reads the next block from the disk meanwhile."""
    block, start = memoryview(bytearray(_BLOCK_BYTES)), 0
    while size := file.readinto(block):
        start += size
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), start, _BLOCK_BYTES, os.POSIX_FADV_WILLNEED)
        if hashed is not None:
            hashed.update(block[:size])


def weight_files(folder: Path) -> list[Path]:
    """Returns the paths of the model's safetensors files.

    These are the files that the model's index file lists. If there is no index file, they are all safetensors files in
    the folder. Raises InvalidRequest if a file is missing.
    """
    files = sorted(_indexed_files(folder)) or sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not path.exists()]
    if missing or not files:
        wanted = ", ".join(missing) or "*.safetensors"
        raise InvalidRequest(f"{folder} has no {wanted}: --model must name a Hugging Face folder.", param="model")
    return files


def _indexed_files(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            yield from [folder / name for name in names]
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"{index} is no index of weight files ({error}): download it again.", param="model"
            ) from error
