"""Lists the files of a model, and computes a fingerprint of their content.

Owns which files make up a model: config.json and the weight files. Never imports torch, because the gateway computes
fingerprints too.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue

from graftwork.platform.errors import InvalidRequest

_THREADS = 4
"""Files that are read at the same time. One thread hashes 0.5 to 2 GB a second."""
_BLOCK_BYTES = 1 << 24
"""A thread needs the interpreter's lock between two blocks: with small ones, it would wait for imports most of the time."""


class FingerprintReading:
    """Reads and hashes all files of a model on threads, so that a process can import its code meanwhile.

    What was read stays in the page cache, from which the weights are copied then.
    """

    def __init__(self, folder: Path) -> None:
        """Begins to read. Raises InvalidRequest if a file is missing."""
        self._paths = [folder / "config.json", *weight_files(folder)]
        self._digests = [Future[bytes]() for _ in self._paths]
        waiting = SimpleQueue[tuple[Path, Future[bytes]]]()
        for each in zip(self._paths, self._digests, strict=True):
            waiting.put(each)
        for _ in range(min(_THREADS, len(self._paths))):
            # daemons: a process that fails meanwhile ends at once
            threading.Thread(target=_digest_all, args=(waiting,), name="fingerprint", daemon=True).start()

    def result(self, rounding: str | None = None) -> str:
        """Waits for the end, and returns the fingerprint (see `fingerprint`). Raises InvalidRequest if a file cannot be
        read.
        """
        digest = hashlib.sha256(b"graftwork/base/1")
        for path, own in zip(self._paths, self._digests, strict=True):
            try:
                digest.update(own.result())
            except OSError as error:
                raise InvalidRequest(f"{path} cannot be read: {error.strerror}.", param="model") from error
        if rounding is not None:
            digest.update(f"rounded to {rounding}".encode())
        return f"sha256:{digest.hexdigest()}"


def fingerprint(folder: Path, rounding: str | None = None) -> str:
    """Returns `sha256:…`, a digest of the content of config.json and of all weight files.

    Equal models in different folders have the same fingerprint. Weights that are rounded when they are loaded make
    another model: `rounding` names to what, such as "int8". Raises InvalidRequest if a file is missing or cannot be
    read.
    """
    return FingerprintReading(folder).result(rounding)


def _digest_all(waiting: "SimpleQueue[tuple[Path, Future[bytes]]]") -> None:
    """Digests the files of a queue until it is empty."""
    while not waiting.empty():
        try:
            path, found = waiting.get_nowait()
        except Empty:
            return  # another thread took the last one
        try:
            found.set_result(_digest(path))
        except (OSError, MemoryError) as error:
            found.set_exception(error)


def _digest(path: Path) -> bytes:
    """Returns the SHA-256 of a file. The system reads the next block from the disk while this one is hashed."""
    digest, block, start = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES)), 0
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            start += size
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), start, _BLOCK_BYTES, os.POSIX_FADV_WILLNEED)
            digest.update(block[:size])
    return digest.digest()


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
