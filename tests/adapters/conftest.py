"""One inspection worker for all tests, because a worker takes a quarter of a second to start."""

from collections.abc import Iterator

import pytest

from graftwork.adapters.inspection.inspector import AdapterInspector
from tests.adapters.shared_inspector import shared_inspector


@pytest.fixture(scope="session")
def inspector() -> Iterator[AdapterInspector]:
    with shared_inspector() as inspector:
        yield inspector
