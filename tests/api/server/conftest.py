"""Tests of the server run on both of its event loops: on uvloop, and on asyncio's own."""

import asyncio
from collections.abc import Callable, Mapping

import pytest

from graftwork.api.server.uvicorn_server import new_event_loop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": new_event_loop, "asyncio": asyncio.new_event_loop}
