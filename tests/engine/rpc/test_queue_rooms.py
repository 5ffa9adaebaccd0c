"""Tests of refusals in the gateway, by what an engine says about the bounds of its queue."""

import asyncio
from pathlib import Path

import pytest

from graftwork.engine.core.deadlines import Newcomer
from graftwork.engine.core.load import EngineLoad, LoadReport
from graftwork.engine.core.queue_room import QueueRoom
from graftwork.engine.core.requests import EngineRequest, ServiceTier
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.rpc.client import GrpcEngineClient
from graftwork.engine.rpc.codec import load_from_json, to_json
from graftwork.engine.rpc.queue_rooms import QueueRooms
from graftwork.engine.rpc.server import EngineServer
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import CapacityContended
from graftwork.platform.ids import IsolationDomain, RequestId, new_id
from tests.engine.conftest import RandomModels

TENANT, OTHER = IsolationDomain(b"tenant"), IsolationDomain(b"other")


def request(tokens: int = 10, emitted: tuple[int, ...] = (), domain: IsolationDomain = TENANT) -> EngineRequest:
    """A request whose answer is long, so that a queue of them does not get shorter at once."""
    sampling = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    prompt = tuple(5 + number % 40 for number in range(tokens))
    return EngineRequest(RequestId(new_id("req")), prompt, sampling, domain, emitted_token_ids=emitted)


def rooms(clock: ManualClock, requests_left: int, tokens_left: int = 1000, age_s: float = 0.0) -> QueueRooms:
    """What an engine has just said of TENANT, over the wire."""
    found = QueueRooms(clock)
    found.note(load(requests_left, tokens_left, age_s))
    return found


def load(requests_left: int, tokens_left: int = 1000, age_s: float = 0.0) -> LoadReport:
    room = QueueRoom(TENANT.hex(), 7, 300, requests_left, tokens_left, 1.25)
    text = to_json(EngineLoad(rooms=(room,), age_s=age_s))
    return LoadReport(lambda: load_from_json(text))


def test_a_domain_without_room_is_refused_as_the_engine_would() -> None:
    """The error is the engine's own, with its time to retry. Other domains may wait."""
    found = rooms(ManualClock(), 0)

    with pytest.raises(CapacityContended, match="7 requests with 300 prompt tokens of yours wait") as refusal:
        found.check(TENANT)
    found.check(OTHER)

    assert (refusal.value.code, refusal.value.status, refusal.value.retry_after_s) == ("queue_full", 429, 1.25)


def test_the_requests_that_were_sent_since_fill_the_room() -> None:
    """Of a room for two, the third request is refused; not if the engine has refused one of the two."""
    found, first = rooms(ManualClock(), 2), request()
    for one in (first, request()):
        found.check(TENANT, 10)
        found.sent(one)

    with pytest.raises(CapacityContended, match="9 requests with 320"):
        found.check(TENANT)
    found.refused(first)

    found.check(TENANT)


def test_a_prompt_that_is_longer_than_the_room_is_refused() -> None:
    """A room of 50 tokens, of which 10 are used, has 40 left."""
    found = rooms(ManualClock(), 5, tokens_left=50)
    found.sent(request(10))

    found.check(TENANT, 40)
    with pytest.raises(CapacityContended):
        found.check(TENANT, 41)


def test_a_request_that_the_load_cannot_know_still_counts() -> None:
    """What was sent after a load was made fills the room that it tells; what was sent before is known to the engine."""
    clock = ManualClock()
    found = rooms(clock, 9)
    found.sent(request())
    clock.advance(0.2)
    found.sent(request())
    clock.advance(0.05)

    found.note(load(2, age_s=0.1))
    found.check(TENANT)
    found.note(load(1, age_s=0.1))
    with pytest.raises(CapacityContended, match="8 requests"):
        found.check(TENANT)


def test_a_request_whose_prompt_is_being_read_takes_room() -> None:
    """With room for one, a request that has passed before its prompt was read leaves none to the next one, until it comes."""
    found = rooms(ManualClock(), 1)
    found.check(TENANT)
    found.coming(TENANT)
    with pytest.raises(CapacityContended):
        found.check(TENANT)

    found.come(request())

    found.check(TENANT)


def test_an_old_word_refuses_nobody() -> None:
    """A word is believed for 0.3 s from when it was so. The next load replaces it, also one without rooms."""
    clock = ManualClock()
    found, old, replaced = rooms(clock, 0), rooms(clock, 0, age_s=0.25), rooms(clock, 0)
    replaced.note(LoadReport(EngineLoad))

    clock.advance(0.1)

    replaced.check(TENANT)
    old.check(TENANT)
    with pytest.raises(CapacityContended):
        found.check(TENANT)
    clock.advance(0.21)
    found.check(TENANT)


async def test_a_gateway_refuses_at_once_while_the_queue_of_a_tenant_is_full(
    models: RandomModels, tmp_path: Path
) -> None:
    """When a tenant's part of the engine's queue is full, its next request is refused before the gateway waits for anything,
    and before its prompt is known. Another tenant's request, and one that has begun its answer elsewhere, go to the engine.
    Loads say how old they are.
    """
    address = f"unix:{tmp_path}/engine.sock"
    config = {"max_running": 1, "max_waiting": 40, "waiting_share": 0.5, "max_draft_tokens": 0}
    server = EngineServer(models.engine(**config).engine, address)
    await server.start()
    client = GrpcEngineClient(address)
    is_full, ages_s = asyncio.Event(), list[float]()

    def note(report: LoadReport) -> None:
        load = report.read()
        ages_s.append(load.age_s)
        if any(room[3] <= 0 for room in load.rooms):
            is_full.set()

    client.follow_load(note)
    refusals: list[CapacityContended] = []

    async def run(sent: EngineRequest) -> None:
        try:
            _ = [event async for event in client.generate(sent)]
        except CapacityContended as error:
            refusals.append(error)

    waiting = [asyncio.create_task(run(request())) for _ in range(60)]
    async with asyncio.timeout(60):
        await is_full.wait()

    with pytest.raises(CapacityContended, match="of yours wait"):
        client.refuse_early(Newcomer(ServiceTier.DEFAULT, TENANT))
    with pytest.raises(CapacityContended, match="of yours wait"):
        anext(client.generate(request(1))).send(None)  # runs until it would wait
    client.refuse_early(Newcomer(ServiceTier.DEFAULT, OTHER))
    others = [asyncio.create_task(run(other)) for other in (request(domain=OTHER), request(emitted=(7,)))]
    await asyncio.sleep(0)
    assert not any(task.done() for task in others)

    for task in (*waiting, *others):
        task.cancel()
    await asyncio.gather(*waiting, *others, return_exceptions=True)
    await client.close()
    await server.stop()
    assert refusals
    assert any(age_s > 0.0 for age_s in ages_s)
    assert all(age_s < 60.0 for age_s in ages_s)
