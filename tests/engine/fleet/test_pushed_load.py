"""Tests of engines that send their load with their tokens."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from graftwork.engine.core.load import EngineLoad, LoadReport
from graftwork.engine.fleet.members import MemberAddress
from graftwork.engine.rpc.codec import load_from_json
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import IsolationDomain
from tests.engine.fleet.fake_members import FakeMember
from tests.engine.fleet.test_client import Fleet, request


@pytest.fixture
async def fleet(manual_clock: ManualClock) -> AsyncIterator[Fleet]:
    fleet = Fleet(manual_clock)
    yield fleet
    await fleet.client.close()


async def few_turns() -> None:
    """Lets the watches of the engines run for a few turns of the event loop, too few for a tick."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_an_engine_that_sends_its_load_with_tokens_is_not_asked_for_it(fleet: Fleet) -> None:
    """A load that came with tokens counts at once, and stands for the answer to the next question; then it is old."""
    await fleet.client.describe()
    a, b = fleet.engines["a"], fleet.engines["b"]

    def asked(of: FakeMember, times: int) -> Callable[[], bool]:
        before = of.num_questions
        return lambda: of.num_questions >= before + times

    a.note_load(EngineLoad(epoch=a.description.epoch, queued_tokens=70, free_pages=9, prefill_token_s=0.002))
    (shown,) = [one for one in fleet.client.replicas.figures() if one.replica_id == "a"]
    assert shown.queued_tokens == 70
    assert shown.first_token_s == pytest.approx(71 * 0.002)
    before = a.num_questions
    await fleet.until(asked(b, 20))
    assert a.num_questions - before <= 1  # one may have been under way
    fleet.clock.advance(1)
    await fleet.until(asked(a, 2))


async def test_a_load_of_another_epoch_is_refused(manual_clock: ManualClock) -> None:
    """A load that comes with tokens from an engine of another epoch than its lease says takes the engine's requests."""
    fleet = Fleet(manual_clock)
    fleet.source.places = [MemberAddress("a", "a", epoch=2)]
    fleet.engines["a"].description = replace(fleet.engines["a"].description, epoch=2)
    await fleet.client.describe()
    member = fleet.client.membership.members["a"]
    assert member.is_ready

    fleet.engines["a"].note_load(EngineLoad(epoch=1))

    assert member not in fleet.client.membership.ready
    with pytest.raises(Unavailable, match="epoch 1, and epoch 2 is expected"):
        await fleet.answer(request())
    assert not fleet.engines["a"].requests
    await fleet.client.close()


async def test_only_the_last_load_before_a_placement_is_decoded(fleet: Fleet) -> None:
    """Of several loads that came with tokens only the last is decoded, once, when a request is placed by it."""
    await fleet.client.describe()
    decoded: list[int] = []

    def report(queued_tokens: int) -> LoadReport:
        def decode() -> EngineLoad:
            decoded.append(queued_tokens)
            return EngineLoad(epoch=fleet.engines["a"].description.epoch, queued_tokens=queued_tokens)

        return LoadReport(decode)

    for queued_tokens in (1, 2, 90_000):
        fleet.engines["a"].note_report(report(queued_tokens))
    assert decoded == []
    for number in range(8):
        await fleet.answer(request(domain=IsolationDomain(b"%d" % number)))

    assert decoded == [90_000]
    assert fleet.served()["a"] == 0


async def test_the_timer_reads_a_load_that_no_request_asks_for(fleet: Fleet) -> None:
    """Without requests and questions, a load that came with tokens counts at the timer."""
    await fleet.client.describe()
    for engine in fleet.engines.values():
        engine.note_load(EngineLoad(epoch=engine.description.epoch))
    await few_turns()  # questions that were under way end, and no engine is asked again
    a = fleet.engines["a"]

    a.note_load(EngineLoad(epoch=a.description.epoch, queued_tokens=70))
    await few_turns()

    assert fleet.client.membership.members["a"].load.queued_tokens == 70


async def test_an_answer_replaces_a_load_that_was_sent_before_it(fleet: Fleet) -> None:
    """A load that came with tokens before the answer to a question is older than the answer, and is dropped."""
    await fleet.client.describe()
    member, epoch = fleet.client.membership.members["a"], fleet.engines["a"].description.epoch
    fleet.engines["a"].note_load(EngineLoad(epoch=epoch, queued_tokens=70))

    member.note_load(EngineLoad(epoch=epoch, queued_tokens=9))
    fleet.client.membership.read_reports()

    assert member.load.queued_tokens == 9


async def test_requests_count_that_were_sent_after_a_load(fleet: Fleet) -> None:
    """What is sent after a load came adds to it, though the load is first read then; what was sent before does not."""
    fleet.source.places = fleet.source.places[:1]
    await fleet.client.describe()
    engine, member = fleet.engines["a"], fleet.client.membership.members["a"]
    await fleet.answer(request(64))
    engine.note_load(EngineLoad(epoch=engine.description.epoch, running_requests=1))

    await fleet.answer(request(100, domain=IsolationDomain(b"another")))

    assert (member.sent_tokens, member.sent_requests, member.load.running_requests) == (100, 1, 1)


async def test_an_engine_whose_load_cannot_be_read_gets_no_requests_until_one_can(fleet: Fleet) -> None:
    """An engine that sends what is no load is left out, with the reason, and the others are still followed."""
    await fleet.client.describe()
    a, member = fleet.engines["a"], fleet.client.membership.members["a"]

    a.note_report(LoadReport(lambda: load_from_json('{"queued_tokens": [')))
    assert member not in fleet.client.membership.ready
    assert "Run gateway and engine of one version." in str(member.problem)
    fleet.engines["b"].is_stopped = True
    fleet.engines["b"].note_load(EngineLoad(epoch=fleet.engines["b"].description.epoch, queued_tokens=70))
    await fleet.until(lambda: fleet.client.membership.members["b"].load.queued_tokens == 70)
    fleet.clock.advance(1)

    await fleet.until(lambda: member.is_ready)
