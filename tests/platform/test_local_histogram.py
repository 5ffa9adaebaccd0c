"""The histogram without locks shows what prometheus_client's own does."""

import re

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from graftwork.platform.telemetry import LocalHistogram

BOUNDS = (0.001, 0.25, 1.0, 2.5)


def shown(registry: CollectorRegistry) -> str:
    """Without the time at which the histogram was made."""
    return re.sub(r"(_created) \S+", r"\1", generate_latest(registry).decode())


@given(st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0.0, 10.0))))
def test_it_shows_what_the_librarys_own_shows(values: list[float]) -> None:
    """Byte for byte, whatever was observed, and at the very ends of the buckets too."""
    own, theirs = CollectorRegistry(), CollectorRegistry()
    local = LocalHistogram("some_seconds", "Some text.", BOUNDS, own)
    histogram = Histogram("some_seconds", "Some text.", buckets=BOUNDS, registry=theirs)

    for value in values:
        local.observe(value)
        histogram.observe(value)

    assert shown(own) == shown(theirs)
