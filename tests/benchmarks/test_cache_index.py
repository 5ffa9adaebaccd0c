"""Tests how much memory the engine's index of cached KV takes for a page."""

import pytest
from benchmarks.cache_index import bytes_per_page


@pytest.mark.parametrize(
    ("shape", "most_bytes"),
    [("short", 560), ("chains", 400), ("both", 450), ("files of 1", 720), ("files of 8", 250)],
)
def test_the_index_takes_few_bytes_for_a_page(shape: str, most_bytes: int) -> None:
    """A page takes at most so many bytes of Python's memory, on the device, on device and host, and in a file's record."""
    assert bytes_per_page(shape, 6 * 2**10) < most_bytes
