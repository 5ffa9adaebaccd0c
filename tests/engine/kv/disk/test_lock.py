"""Tests that a folder has one engine at a time."""

from pathlib import Path
from threading import Timer

import pytest

from graftwork.engine.kv.disk.lock import FolderLock
from graftwork.platform.errors import InvalidRequest


def test_a_folder_is_locked_until_it_is_released(tmp_path: Path) -> None:
    """A second lock is refused with the flag that helps, and succeeds after the first is released."""
    first, second = FolderLock(tmp_path / "kv"), FolderLock(tmp_path / "kv")
    first.acquire()

    with pytest.raises(InvalidRequest, match="--kv-dir"):
        second.acquire()
    first.release()
    second.acquire()

    second.release()


def test_a_successor_waits_for_its_predecessor(tmp_path: Path) -> None:
    """A lock that waits for another one is acquired when that one is released."""
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    leaving = Timer(0.2, first.release)
    leaving.start()

    second.acquire(timeout_s=30)

    with pytest.raises(InvalidRequest):
        first.acquire()
    leaving.join()
    second.release()
