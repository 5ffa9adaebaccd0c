"""The data folder: who may read it, and which server has it."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graftwork.platform.data_folder import locked_data_folder, prepare_data_folder, warn_of_readers
from graftwork.platform.errors import Conflict, InvalidRequest

HOLDS = """
import sys
from pathlib import Path
from graftwork.platform.data_folder import locked_data_folder
with locked_data_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_new_folder_is_its_owners_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the umask allows, the folder is made with mode 0700, and nothing is logged."""
    before = os.umask(0)
    try:
        prepare_data_folder(tmp_path / "data")
        warn_of_readers(tmp_path / "data")
    finally:
        os.umask(before)

    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    assert not caplog.records


def test_a_folder_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An existing folder keeps its mode; the log says which command closes it."""
    tmp_path.chmod(0o755)

    with caplog.at_level(logging.WARNING):
        prepare_data_folder(tmp_path)
        warn_of_readers(tmp_path)

    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert f"chmod 700 {tmp_path}" in caplog.text


def test_what_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    """A file, and a place where nothing can be made, are refused with the flag to change."""
    (tmp_path / "file").touch()

    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/graftwork")):
        with pytest.raises(InvalidRequest, match="--data-dir") as caught:
            prepare_data_folder(path)
        assert str(path) in caught.value.message


def test_a_folder_in_use_names_its_server_until_that_is_gone(tmp_path: Path) -> None:
    """A second server is refused with the first one's process id, and let in once that was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"

        with pytest.raises(Conflict, match=f"in use by process {first.pid}:"), locked_data_folder(tmp_path):
            pass
        first.kill()
        first.wait()

    with locked_data_folder(tmp_path):
        assert (tmp_path / "serve.lock").read_text().strip() == str(os.getpid())
