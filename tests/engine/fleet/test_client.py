"""Tests of several engines behind one client: placement, failover, epochs, drain. Its engines are scripted."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from graftwork.engine.core.deadlines import Newcomer
from graftwork.engine.core.events import EngineEvent, PromptAdmitted, RequestFinished, TokensGenerated
from graftwork.engine.core.load import EngineLoad
from graftwork.engine.core.requests import EngineRequest, ServiceTier, SessionKey, SessionUse
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.session_commands import SessionCommand, SessionVerb
from graftwork.engine.fleet.client import FleetClient
from graftwork.engine.fleet.members import MemberAddress
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import CapacityContended, Conflict, DeadlineExceeded, NotFound, Unavailable
from graftwork.platform.ids import IsolationDomain, RequestId, new_id
from tests.engine.fleet.fake_members import FakeMember, places, token_at

NAMES = ("a", "b", "c")


class Fleet:
    """A client of three scripted engines."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.source = places(*NAMES)
        self.engines = {name: FakeMember() for name in NAMES}
        self.client = FleetClient(self.source, self._connect, clock, look_every_s=0.0)

    def _connect(self, address: str) -> FakeMember:
        if self.engines[address].closed.is_set():
            self.engines[address] = replace(self.engines[address], closed=asyncio.Event(), holds_after=None)
        return self.engines[address]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Lets the watches of the engines run until a condition holds."""
        for _ in range(10_000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("never happened")

    async def answer(self, asked: EngineRequest) -> list[EngineEvent]:
        return [event async for event in self.client.generate(asked)]

    def served(self) -> dict[str, int]:
        return {name: len(engine.requests) for name, engine in self.engines.items()}


@pytest.fixture
async def fleet(manual_clock: ManualClock) -> AsyncIterator[Fleet]:
    fleet = Fleet(manual_clock)
    yield fleet
    await fleet.client.close()


def request(prompt: int = 100, session: str | None = None, max_tokens: int = 6, **fields: object) -> EngineRequest:
    asked = EngineRequest(
        request_id=RequestId(new_id("req")),
        prompt_token_ids=tuple(range(prompt)),
        sampling=SamplingParams(max_tokens=max_tokens, seed=3),
        domain=IsolationDomain(b"tenant"),
        session=None if session is None else SessionUse(SessionKey(session)),
    )
    return replace(asked, **fields)  # type: ignore[arg-type]


def tokens(events: list[EngineEvent]) -> list[int]:
    return [token for event in events if isinstance(event, TokensGenerated) for token in event.token_ids]


def the_answer(asked: EngineRequest) -> list[int]:
    return [token_at(asked, place) for place in range(asked.sampling.max_tokens)]


async def test_a_request_goes_to_one_engine_and_its_prefix_follows_it(fleet: Fleet) -> None:
    """Requests with the same prompt meet at one engine; those without a common prefix are spread."""
    for _ in range(4):
        asked = request(1000)
        assert tokens(await fleet.answer(asked)) == the_answer(asked)
    assert sorted(fleet.served().values()) == [0, 0, 4]

    for number in range(60):
        await fleet.answer(request(1000, domain=IsolationDomain(b"%d" % number)))

    assert min(fleet.served().values()) >= 10


async def test_a_session_goes_back_to_its_engine(fleet: Fleet) -> None:
    """Turns and commands of a session meet at one engine, CLOSE reaches all, and a new session is free again."""
    for turn in range(1, 5):
        await fleet.answer(request(300 * turn, session="s"))
    (home,) = [name for name, number in fleet.served().items() if number]
    command = SessionCommand(SessionVerb.HOLD, SessionKey("s"), IsolationDomain(b"tenant"), (), (1, 2, 3))

    await fleet.client.run_session_command(command)
    assert {name for name, engine in fleet.engines.items() if engine.commands} == {home}
    await fleet.client.run_session_command(replace(command, verb=SessionVerb.CLOSE))

    assert {name for name, engine in fleet.engines.items() if engine.commands} == set(NAMES)


async def test_a_session_leaves_an_engine_with_a_long_queue(fleet: Fleet) -> None:
    """When the session's engine reports more queued tokens than the session has, the next turn goes elsewhere."""
    await fleet.answer(request(640, session="s"))
    (home,) = [name for name, number in fleet.served().items() if number]

    fleet.engines[home].load = EngineLoad(queued_tokens=5000)
    await fleet.until(lambda: fleet.client.membership.members[home].load.queued_tokens == 5000)
    await fleet.answer(request(700, session="s"))

    assert fleet.served()[home] == 1


@pytest.mark.parametrize("emitted", range(7))
async def test_a_lost_engine_is_not_seen_in_the_stream(fleet: Fleet, emitted: int) -> None:
    """Wherever the engine is lost, the caller sees one admission, each token once, and one end with all tokens."""
    for engine in fleet.engines.values():
        engine.dies_after = emitted
    asked = request(session="s")

    stream = fleet.client.generate(asked)
    events = [await anext(stream)]
    for engine in fleet.engines.values():
        engine.dies_after = emitted if engine.requests else None
    events += [event async for event in stream]

    assert [type(event) for event in events] == [PromptAdmitted, *[TokensGenerated] * 6, RequestFinished]
    assert tokens(events) == the_answer(asked)
    assert isinstance(events[-1], RequestFinished)
    assert events[-1].completion_tokens == 6
    lengths = [len(one.emitted_token_ids) for engine in fleet.engines.values() for one in engine.requests]
    assert lengths == [0, emitted] or lengths == [emitted, 0]


async def test_a_poisonous_request_ends_three_engines_at_most(manual_clock: ManualClock) -> None:
    """A request whose engines die moves twice, then it ends with the last engine's error; the others live."""
    fleet = Fleet(manual_clock)
    fleet.engines |= {name: FakeMember() for name in "defgh"}
    fleet.source.places += places(*"defgh").places
    for engine in fleet.engines.values():
        engine.dies_after = 1

    with pytest.raises(Unavailable):
        await fleet.answer(request())

    assert sum(fleet.served().values()) == 3
    assert sum(engine.is_absent for engine in fleet.engines.values()) == 3
    await fleet.client.close()


async def test_the_time_limit_goes_on_over_a_move(fleet: Fleet) -> None:
    """The second engine gets the seconds that are left, and no deadline for a first token that has come."""
    for engine in fleet.engines.values():
        engine.dies_after, engine.holds_after = 3, 2
    stream = fleet.client.generate(request(timeout_s=10.0, deadline_s=5.0))
    for _ in range(2):
        await anext(stream)
    (first,) = [engine for engine in fleet.engines.values() if engine.requests]
    for engine in fleet.engines.values():
        if engine is not first:
            engine.dies_after = engine.holds_after = None
    fleet.clock.advance(4.0)
    first.release.set()
    _ = [event async for event in stream]

    (moved,) = [engine.requests[0] for engine in fleet.engines.values() if engine is not first and engine.requests]
    assert (moved.timeout_s, moved.deadline_s) == (6.0, None)


async def test_a_request_that_is_late_does_not_move(fleet: Fleet) -> None:
    """If the time limit has passed when the engine is lost, the request ends with a 504."""
    for engine in fleet.engines.values():
        engine.dies_after, engine.holds_after = 3, 2
    stream = fleet.client.generate(request(timeout_s=10.0))
    await anext(stream)
    await anext(stream)
    fleet.clock.advance(11.0)
    for engine in fleet.engines.values():
        engine.release.set()

    with pytest.raises(DeadlineExceeded, match="10 seconds"):
        _ = [event async for event in stream]


async def test_a_caller_who_leaves_cancels_at_the_engine(fleet: Fleet) -> None:
    """Closing the stream cancels the request at the engine that has it now."""
    asked = request()
    stream = fleet.client.generate(asked)
    await anext(stream)
    await anext(stream)

    await stream.aclose()

    assert [name for engine in fleet.engines.values() for name in engine.cancelled] == [asked.request_id]


async def test_a_fleet_without_engines_is_a_503_and_heals(fleet: Fleet) -> None:
    """Without a living engine every call is Unavailable with a retry-after; when one answers again, requests are served."""
    for engine in fleet.engines.values():
        engine.is_absent = True
    for call in (fleet.client.describe, fleet.client.stats, fleet.client.stalled_s):
        with pytest.raises(Unavailable) as absent:
            await call()
        assert absent.value.retry_after_s
    with pytest.raises(Unavailable) as absent:
        await fleet.answer(request())
    assert absent.value.retry_after_s

    fleet.engines["b"].is_absent = False
    await fleet.client.membership.wait_for_ready()
    asked = request()

    assert tokens(await fleet.answer(asked)) == the_answer(asked)
    assert fleet.served() == {"a": 0, "b": 1, "c": 0}


async def test_a_list_that_cannot_be_read_changes_nothing(fleet: Fleet) -> None:
    """While the source of the list does not answer, requests go to the engines that were known last."""
    await fleet.answer(request())
    fleet.source.is_absent = True
    for _ in range(50):
        await asyncio.sleep(0)

    assert tokens(await fleet.answer(request())) == the_answer(request())


async def test_a_full_engine_is_no_refusal(fleet: Fleet) -> None:
    """A request that an engine has no room for tries the others, and is refused only if all are full."""
    full = CapacityContended("full", retry_after_s=1.0)
    fleet.engines["a"].refusal = fleet.engines["b"].refusal = full
    asked = request()
    assert tokens(await fleet.answer(asked)) == the_answer(asked)

    fleet.engines["c"].refusal = full
    with pytest.raises(CapacityContended):
        await fleet.answer(request())


async def test_a_line_is_late_only_if_it_is_at_every_engine(fleet: Fleet) -> None:
    """A deadline that one engine can meet is not refused; if none can, the wait is that of the engine with the least."""
    await fleet.answer(request())
    one, two, three = fleet.engines.values()
    one.late_below_s, two.late_below_s = 9.0, 5.0

    newcomer = Newcomer(ServiceTier.DEFAULT, IsolationDomain(b"tenant"), deadline_s=1.0)
    fleet.client.refuse_early(newcomer)
    three.late_below_s = 7.0
    with pytest.raises(CapacityContended) as refusal:
        fleet.client.refuse_early(newcomer)

    assert refusal.value.retry_after_s == 4.0


async def test_other_weights_under_one_name_are_refused_with_both_fingerprints(fleet: Fleet) -> None:
    """An engine with another fingerprint gets no requests, and the list of replicas says why, with both fingerprints."""
    own = fleet.engines["a"].description
    other = replace(own, fingerprint="sha256:" + "9" * 64)
    await fleet.client.describe()
    fleet.engines["d"] = FakeMember(other)
    fleet.source.places.append(MemberAddress("d", "d"))
    members = fleet.client.membership.members
    await fleet.until(lambda: "d" in members and own.fingerprint in (members["d"].problem or ""))

    assert other.fingerprint in (members["d"].problem or "")
    assert not members["d"].is_ready
    (reading,) = [one for one in await fleet.client.replicas.list() if one.replica_id == "d"]
    assert reading.status == "absent"


async def test_an_engine_of_another_epoch_is_fenced(fleet: Fleet) -> None:
    """An engine that says another epoch than its lease gets no requests; with the right epoch it does."""
    fleet.source.places = [MemberAddress("a", "a", epoch=2)]
    fleet.engines["a"].description = replace(fleet.engines["a"].description, epoch=1)
    with pytest.raises(Unavailable, match="epoch 1, and epoch 2"):
        await fleet.answer(request())
    assert fleet.served()["a"] == 0

    fleet.engines["a"].description = replace(fleet.engines["a"].description, epoch=2)
    await fleet.client.membership.wait_for_ready()
    await fleet.answer(request())

    assert fleet.served()["a"] == 1


async def test_a_new_epoch_moves_the_requests_of_the_old_engine(fleet: Fleet) -> None:
    """When the list names a new epoch, streams at the former engine go on elsewhere, also if it still lives."""
    for engine in fleet.engines.values():
        engine.holds_after = 2
    asked = request()
    stream = fleet.client.generate(asked)
    events = [await anext(stream), await anext(stream), await anext(stream)]
    (home,) = [name for name, engine in fleet.engines.items() if engine.requests]
    for name, engine in fleet.engines.items():
        engine.holds_after = 2 if name == home else None
    fleet.source.places = [
        MemberAddress(name, name, epoch=5) if name == home else MemberAddress(name, name) for name in NAMES
    ]

    events += [event async for event in stream]

    assert tokens(events) == the_answer(asked)


async def test_a_draining_engine_ends_its_requests_and_gets_no_new_ones(fleet: Fleet) -> None:
    """A drain waits for running requests, places nothing there, and calls back once the engine has nothing to do."""
    drained = asyncio.Event()

    async def note(replica_id: str) -> None:
        drained.set()

    for engine in fleet.engines.values():
        engine.holds_after = 2
    replicas = fleet.client.replicas
    replicas.on_drained = note
    running = asyncio.create_task(fleet.answer(asked := request(session="s")))
    await fleet.until(lambda: any(engine.held.is_set() for engine in fleet.engines.values()))
    (home,) = [name for name, engine in fleet.engines.items() if engine.requests]
    for engine in fleet.engines.values():
        engine.holds_after = None

    reading = await replicas.drain(home)
    again = await replicas.drain(home)
    others = [await fleet.answer(request(session="s")) for _ in range(5)]

    assert reading.status == again.status == "draining"
    assert len(others) == 5
    assert fleet.served()[home] == 1
    assert not drained.is_set()
    fleet.engines[home].release.set()
    await drained.wait()
    assert tokens(await running) == the_answer(asked)


async def test_a_drain_hands_over_what_takes_too_long(fleet: Fleet) -> None:
    """After the grace, running requests go on at another engine, without an error and without a token twice."""
    for engine in fleet.engines.values():
        engine.holds_after = 2
    replicas = fleet.client.replicas
    replicas.grace_s = 0.0
    running = asyncio.create_task(fleet.answer(asked := request()))
    await fleet.until(lambda: any(engine.held.is_set() for engine in fleet.engines.values()))
    (home,) = [name for name, engine in fleet.engines.items() if engine.requests]
    for name, engine in fleet.engines.items():
        engine.holds_after = 2 if name == home else None

    await replicas.drain(home)

    assert tokens(await running) == the_answer(asked)


async def test_the_last_engine_cannot_drain(fleet: Fleet) -> None:
    """Unknown ids are a 404, and the only engine that is ready is a 409."""
    replicas = fleet.client.replicas
    with pytest.raises(NotFound):
        await replicas.drain("nowhere")
    await replicas.drain("a")
    await replicas.drain("b")

    with pytest.raises(Conflict) as refused:
        await replicas.drain("c")

    assert refused.value.code == "only_replica"


async def test_what_is_forgotten_is_forgotten_everywhere(fleet: Fleet) -> None:
    """A domain must be forgotten by all engines, absent ones too; an adapter by those that answer; one engine probes."""
    await fleet.client.describe()
    await fleet.client.probe_adapter("sha256:x")
    assert sum(len(engine.probed) for engine in fleet.engines.values()) == 1
    fleet.engines["b"].is_absent = True

    await fleet.client.forget_adapter("sha256:x")
    with pytest.raises(Unavailable):
        await fleet.client.forget_domain(IsolationDomain(b"t"))

    assert [engine.forgotten for engine in fleet.engines.values()] == [["sha256:x", "74"], [], ["sha256:x", "74"]]
    fleet.engines["b"].is_absent = False
    await fleet.client.forget_domain(IsolationDomain(b"t"))
    assert fleet.engines["b"].forgotten == ["74"]


async def test_the_figures_of_engines_add_up(fleet: Fleet) -> None:
    """Counters and sizes are sums, ratios are means, adapters are listed once; the description has room for all."""
    stats, description = await fleet.client.stats(), await fleet.client.describe()

    assert (stats.steps, stats.running_requests, stats.kv_usage_ratio) == (30, 3, 0.5)
    assert stats.resident_adapters == ("a",)
    assert description.device_pages == 3 * fleet.engines["a"].description.device_pages
