"""An adapter inspector that the tests of a session share."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from graftwork.adapters.inspection.inspector import AdapterInspector


@contextmanager
def shared_inspector() -> Iterator[AdapterInspector]:
    """One worker; closed on a loop of its own."""
    inspector = AdapterInspector(num_workers=1)
    yield inspector
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(asyncio.run, inspector.close()).result()
