"""Tests of long bodies that another process parses, and of the pool of worker processes."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from graftwork.platform.errors import CapacityContended, InvalidRequest, Unavailable
from graftwork.platform.json_worker import JsonParsing
from graftwork.platform.strict_json import MAX_CONTAINERS, parse_json
from graftwork.platform.worker_pool import WorkerPool


@pytest.fixture
async def parsing() -> AsyncIterator[JsonParsing]:
    parsing = JsonParsing()
    yield parsing
    await parsing.close()


async def test_a_worker_parses_as_this_process_does(parsing: JsonParsing) -> None:
    """Values and refusals of a worker are those of the parser, and no process starts before the first body."""
    assert not parsing.workers.worker_pids
    value: dict[str, Any] = {"a": [1, 2.5, None, True, "é🙂\n", {"b": {}}], "c": "x" * 100_000}

    found = await parsing.parse("ten_1", json.dumps(value).encode())

    assert found == value
    (pid,) = parsing.workers.worker_pids
    assert pid != os.getpid()
    for body in (b"[NaN]", b"{", b"[" * 100_000, b'"\\ud800"', b"[" + b"[]," * MAX_CONTAINERS + b"[]]"):
        with pytest.raises(InvalidRequest) as ours:
            parse_json(body)
        with pytest.raises(InvalidRequest) as theirs:
            await parsing.parse("ten_1", body)
        assert (theirs.value.message, theirs.value.code) == (ours.value.message, ours.value.code)


async def test_millions_of_values_are_refused_by_a_worker(parsing: JsonParsing) -> None:
    """A body of millions of empty lists is refused, and the next body is parsed."""
    with pytest.raises(InvalidRequest, match="send fewer"):
        await parsing.parse("ten_1", b"[" + b"[]," * 2_000_000 + b"[]]")

    assert await parsing.parse("ten_1", b"[1]") == [1]


async def test_a_worker_that_dies_is_replaced(parsing: JsonParsing) -> None:
    """A body is parsed even if the worker was killed before it."""
    await parsing.parse("ten_1", b"1")
    (killed,) = parsing.workers.worker_pids
    os.kill(killed, signal.SIGKILL)

    assert await parsing.parse("ten_1", b"2") == 2
    assert killed not in parsing.workers.worker_pids


async def test_closing_ends_the_workers() -> None:
    """After `close` no worker runs, and a body is refused as unavailable."""
    parsing = JsonParsing()
    await parsing.parse("ten_1", b"1")
    (pid,) = parsing.workers.worker_pids

    await parsing.close()

    assert not psutil.pid_exists(pid)
    with pytest.raises(Unavailable):
        await parsing.parse("ten_1", b"1")


async def test_one_tenant_cannot_queue_without_end() -> None:
    """Above the limit of one tenant its next job is refused, and another tenant's job runs."""
    pool = WorkerPool("graftwork.platform.json_worker", dict, most_waiting=2)
    try:
        waiting = [asyncio.create_task(pool.run("ten_1", b"1")) for _ in range(3)]
        other = asyncio.create_task(pool.run("ten_2", b"2"))
        results = await asyncio.gather(*waiting, other, return_exceptions=True)
    finally:
        await pool.close()

    assert [results[0], results[1], results[3]] == [1, 1, 2]
    assert isinstance(results[2], CapacityContended)
    assert results[2].retry_after_s is not None


async def test_a_pause_holds_only_its_owner() -> None:
    """After a job with a pause, the same tenant's next job waits, and another tenant's job runs."""
    pool = WorkerPool("graftwork.platform.json_worker", dict)
    try:
        first = await pool.run("ten_1", b"1", pause_s=3600.0)
        next_of_first = asyncio.create_task(pool.run("ten_1", b"2"))
        other = await pool.run("ten_2", b"3")
        has_waited = not next_of_first.done()
        next_of_first.cancel()
    finally:
        await pool.close()

    assert (first, other, has_waited) == (1, 3, True)
