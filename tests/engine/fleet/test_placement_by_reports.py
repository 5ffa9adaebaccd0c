"""Tests of where requests go when engines report adapters, queues and KV. The engines are scripted."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from graftwork.engine.core.load import EngineLoad
from graftwork.engine.core.requests import AdapterUse
from graftwork.platform.clock import ManualClock
from graftwork.platform.ids import IsolationDomain
from tests.engine.fleet.test_client import NAMES, Fleet, request

ADAPTER = AdapterUse("sha256:" + "a" * 64)
FREE = EngineLoad(free_pages=1000, prefill_token_s=0.001, adapter_load_s=0.5)
HOT = replace(FREE, resident_adapters=(ADAPTER.digest,))


@pytest.fixture
async def fleet(manual_clock: ManualClock) -> AsyncIterator[Fleet]:
    fleet = Fleet(manual_clock)
    yield fleet
    await fleet.client.close()


async def report(fleet: Fleet, **loads: EngineLoad) -> None:
    """Lets engines report, and waits until the gateway has heard it."""
    for name, load in loads.items():
        fleet.engines[name].load = replace(load, steps=fleet.engines[name].load.steps + 1)
    members = fleet.client.membership.members
    await fleet.client.membership.start()
    await fleet.until(lambda: all(members[one].load.steps == fleet.engines[one].load.steps for one in loads))


async def homes(fleet: Fleet, number: int, *adapters: AdapterUse) -> set[str]:
    """Sends requests of different tenants, which share no prefix. Returns the engines that got some."""
    before = fleet.served()
    for tenant in range(number):
        domain = IsolationDomain(b"%d %d" % (tenant, sum(before.values())))
        await fleet.answer(request(10, max_tokens=1, domain=domain, adapters=adapters))
    return {name for name, count in fleet.served().items() if count > before[name]}


async def test_the_replicas_of_an_adapter_follow_its_traffic(fleet: Fleet) -> None:
    """An adapter has one engine while its queue is shorter than a load, a second one when it is longer, a third one when
    both are busy, and after that all that have it share its requests.
    """
    await report(fleet, a=HOT, b=FREE, c=FREE)
    assert await homes(fleet, 8, ADAPTER) == {"a"}

    busy = replace(HOT, queued_tokens=2000)
    await report(fleet, a=busy)
    (second,) = await homes(fleet, 1, ADAPTER)
    assert second != "a"
    await report(fleet, **{second: HOT})
    assert await homes(fleet, 8, ADAPTER) == {second}

    await report(fleet, a=busy, **{second: busy})
    (third,) = await homes(fleet, 1, ADAPTER)
    assert {"a", second, third} == set(NAMES)

    await report(fleet, a=HOT, **{second: HOT, third: HOT})
    assert await homes(fleet, 40, ADAPTER) == set(NAMES)


async def test_requests_of_the_base_model_ask_for_no_adapter(fleet: Fleet) -> None:
    """An engine that has an adapter loaded gets no more of the requests without one."""
    await report(fleet, a=HOT, b=FREE, c=FREE)

    assert await homes(fleet, 40) == set(NAMES)


async def test_an_engine_whose_memory_is_full_gets_no_request(fleet: Fleet) -> None:
    """Engines are equal but for their free pages: one that must preempt for the prompt gets none, until it has room."""
    full = replace(FREE, free_pages=0)
    prompts = [request(600, max_tokens=1, domain=IsolationDomain(b"%d" % number)) for number in range(24)]
    await report(fleet, a=full, b=FREE, c=FREE)
    for asked in prompts[:12]:
        await fleet.answer(asked)
        await report(fleet, b=FREE, c=FREE)
    assert {name for name, count in fleet.served().items() if count} == {"b", "c"}

    await report(fleet, a=FREE, b=full, c=full)
    for asked in prompts[12:]:
        await fleet.answer(asked)
        await report(fleet, a=FREE)

    assert fleet.served()["a"] == 12
