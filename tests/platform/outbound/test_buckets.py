"""Tests of how buckets are opened: which URLs name one, and which errors come of one."""

from pathlib import Path

import obstore
import pytest

from graftwork.platform.errors import InvalidRequest
from graftwork.platform.outbound.buckets import BucketTimes, check_bucket_url, faults_as_os_errors, open_object_store

TIMES = BucketTimes(attempt_s=1.0, retry_for_s=1.0)


@pytest.mark.parametrize("url", ["", "models", "s3://", "s3:///prefix", "ftp://models/a", "file://", "https://host/a"])
def test_urls_that_name_no_bucket(url: str) -> None:
    """A URL that names no bucket is refused with the setting's name, as a flag and as a field."""
    with pytest.raises(InvalidRequest, match=r"^--artifact-url ") as refusal:
        check_bucket_url(url, "artifact_url")

    assert refusal.value.param == "artifact_url"


def test_faults_are_os_errors(tmp_path: Path) -> None:
    """A missing object is a FileNotFoundError, and any other fault of a bucket an OSError."""
    check_bucket_url("s3://models/prefix", "artifact_url")
    store = open_object_store(f"file://{tmp_path}", TIMES)
    (tmp_path / "file").write_bytes(b"x")

    with pytest.raises(FileNotFoundError), faults_as_os_errors():
        obstore.get(store, "nothing")
    with pytest.raises(OSError, match=r"\S") as fault, faults_as_os_errors():
        obstore.put(store, "file/below", b"x")
    assert not isinstance(fault.value, FileNotFoundError)
