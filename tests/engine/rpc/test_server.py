"""Tests of the engine behind gRPC, and of its typed failures."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graftwork.engine.core.events import PromptAdmitted, RequestFinished, TokensGenerated
from graftwork.engine.core.requests import AdapterUse, EngineRequest
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.stats import EngineStats
from graftwork.engine.core.step import Flight, StepPlan
from graftwork.engine.messages import ReadStats
from graftwork.engine.rpc.client import GrpcEngineClient
from graftwork.engine.rpc.server import EngineServer
from graftwork.platform.errors import CapacityContended, ContextLengthExceeded, InvalidRequest, NotFound, Unavailable
from graftwork.platform.ids import IsolationDomain, RequestId, new_id
from tests.engine.conftest import RandomModels
from tests.engine.flights import BlockedRunner, RunnerAround

Connect = Callable[[], GrpcEngineClient]


@pytest.fixture
async def connect(models: RandomModels, tmp_path: Path) -> AsyncIterator[Connect]:
    """A served engine with two places in its batch and a short queue, and a way to connect clients."""
    address = f"unix:{tmp_path}/engine.sock"
    server = EngineServer(models.engine(max_running=2, max_waiting=2).engine, address)
    await server.start()
    clients: list[GrpcEngineClient] = []

    def make() -> GrpcEngineClient:
        clients.append(GrpcEngineClient(address))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()
    await server.stop()


def request(prompt: list[int], adapter: str | None = None, **sampling: object) -> EngineRequest:
    options = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True} | sampling
    return EngineRequest(
        request_id=RequestId(new_id("req")),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**options),  # type: ignore[arg-type]
        domain=IsolationDomain(b"tenant"),
        adapters=(AdapterUse(adapter),) if adapter is not None else (),
    )


async def until(client: GrpcEngineClient, condition: Callable[[EngineStats], bool]) -> EngineStats:
    """Read the stats until they meet a condition. Each read waits for the loop, so no sleep is needed."""
    for _ in range(10_000):
        stats = await client.stats()
        if condition(stats):
            return stats
    raise AssertionError(f"never happened; the engine last said {stats}")


async def test_a_request_is_answered_in_order(connect: Connect) -> None:
    """The events of a request are its admission, then its tokens, then its end."""
    client = connect()

    events = [event async for event in client.generate(request([5, 6, 7], "sha256:wide"))]

    assert isinstance(events[0], PromptAdmitted)
    assert isinstance(events[-1], RequestFinished)
    tokens = [token for event in events[1:-1] if isinstance(event, TokensGenerated) for token in event.token_ids]
    assert len(tokens) == events[-1].completion_tokens == 6


async def test_a_prediction_and_what_came_of_it_cross(connect: Connect) -> None:
    """With its own answer as prediction, the engine drafts from it and reports that at the end and in its stats."""
    client = connect()
    events = [event async for event in client.generate(request([5, 6, 7]))]
    answer = tuple(token for event in events if isinstance(event, TokensGenerated) for token in event.token_ids)

    again = replace(request([5, 6, 7]), prediction_token_ids=answer)
    *_, finished = [event async for event in client.generate(again)]

    assert isinstance(finished, RequestFinished)
    assert (finished.drafts.accepted_prediction_tokens, finished.drafts.rejected_prediction_tokens) == (len(answer), 0)
    stats = await client.stats()
    assert 0 < finished.drafts.accepted_tokens <= finished.drafts.drafted_tokens <= stats.drafted_tokens
    assert stats.drafted_tokens >= stats.accepted_tokens >= finished.drafts.accepted_tokens


async def test_the_description_crosses_whole(connect: Connect, models: RandomModels) -> None:
    """Every field of the description arrives as it was sent."""
    description = await connect().describe()

    assert description == models.engine(max_running=2, max_waiting=2).engine.description


async def test_requests_of_several_clients_share_steps(connect: Connect) -> None:
    """Four requests of two clients are answered, and some step serves two adapters."""
    clients = [connect(), connect()]
    for adapter in ("sha256:wide", "sha256:narrow"):
        _ = [event async for event in clients[0].generate(request([5], adapter))]

    async def collect(number: int) -> int:
        adapter = "sha256:wide" if number % 2 else "sha256:narrow"
        events = [e async for e in clients[number // 2].generate(request([9, number + 2], adapter, max_tokens=30))]
        return sum(len(event.token_ids) for event in events if isinstance(event, TokensGenerated))

    assert await asyncio.gather(*(collect(number) for number in range(4))) == [30] * 4
    assert (await clients[0].stats()).max_adapters_in_a_step == 2


async def test_closing_a_stream_frees_its_pages(connect: Connect) -> None:
    """A request whose reader leaves after two events holds no page; its KV is only cached."""
    client = connect()
    before = await client.stats()
    stream = client.generate(request([5] * 30, max_tokens=200))
    await anext(stream)
    await anext(stream)

    await stream.aclose()

    after = await until(client, lambda stats: stats.running_requests == 0)
    assert after.active_pages == before.active_pages == 0
    assert after.free_pages + after.cached_pages == before.free_pages + before.cached_pages


async def test_a_client_that_is_gone_frees_its_pages(connect: Connect) -> None:
    """Closing a client cancels all requests that it submitted."""
    watcher, leaver = connect(), connect()
    streams = [leaver.generate(request([5] * 20, max_tokens=200)) for _ in range(3)]
    await asyncio.gather(*(anext(stream) for stream in streams[:2]))

    await leaver.close()

    stats = await until(watcher, lambda stats: stats.running_requests + stats.waiting_requests == 0)
    assert stats.active_pages == 0
    for stream in streams:
        await stream.aclose()


async def test_errors_keep_their_class_and_fields(connect: Connect) -> None:
    """A full queue, a long prompt and an unknown adapter raise the engine's own errors at the client."""
    client = connect()
    with pytest.raises(ContextLengthExceeded, match="300 tokens") as too_long:
        await anext(client.generate(request([5] * 300)))
    with pytest.raises(NotFound):
        await anext(client.generate(request([5], "sha256:nowhere")))

    crowd = [client.generate(request([5, n + 2], max_tokens=240)) for n in range(5)]
    results = await asyncio.gather(*(anext(stream) for stream in crowd), return_exceptions=True)

    refused = [result for result in results if isinstance(result, CapacityContended)]
    assert refused
    assert all(error.retry_after_s for error in refused)
    assert too_long.value.param == "prompt"
    for stream in crowd:
        await stream.aclose()


async def test_a_forgotten_domain_has_nothing_cached(connect: Connect) -> None:
    """The pages of a forgotten domain are freed at once, and its next request finds nothing cached."""
    client = connect()
    prompt = request(list(range(5, 45)))
    _ = [event async for event in client.generate(prompt)]
    assert (await client.stats()).cached_pages > 0

    await client.forget_domain(prompt.domain)

    assert (await client.stats()).cached_pages == 0


async def test_a_request_that_cannot_be_read_ends_alone(connect: Connect) -> None:
    """A request with an unknown service tier, as from a later version, gets an error, and the next request is served."""
    client = connect()
    unheard_of = replace(request([5]), tier="overnight")  # type: ignore[arg-type]

    async with asyncio.timeout(60):
        with pytest.raises(InvalidRequest, match="overnight"):
            await anext(client.generate(unheard_of))
        events = [event async for event in client.generate(request([5, 6]))]

    assert isinstance(events[-1], RequestFinished)


async def test_an_absent_engine_is_a_503_with_its_address_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an engine at the address, every call raises Unavailable with a retry-after."""
    client = GrpcEngineClient(f"unix:{tmp_path}/nobody.sock")

    with pytest.raises(Unavailable, match="No engine") as absent:
        await anext(client.generate(request([5])))
    with pytest.raises(Unavailable):
        await client.describe()

    assert absent.value.retry_after_s
    assert "nobody.sock" not in absent.value.message
    assert "nobody.sock" in caplog.records[0].address  # type: ignore[attr-defined]
    await client.close()


async def test_a_client_outlives_its_engine(models: RandomModels, tmp_path: Path) -> None:
    """If the engine stops during a stream the request fails with a typed error; the client works with a new engine."""
    address = f"unix:{tmp_path}/engine.sock"
    engine = models.engine().engine
    engine.loop.steps.runner = runner = BlockedRunner(engine.loop.steps.runner)
    runner.num_free = 2
    first = EngineServer(engine, address)
    await first.start()
    client = GrpcEngineClient(address)
    stream = client.generate(request([5, 6], max_tokens=250))
    await anext(stream)

    stopping = asyncio.create_task(first.stop())
    with pytest.raises(Unavailable):
        _ = [event async for event in stream]
    runner.gate.set()
    await stopping
    second = EngineServer(models.engine().engine, address)
    await second.start()
    events = [event async for event in client.generate(request([5, 6]))]

    assert isinstance(events[-1], RequestFinished)
    await client.close()
    await second.stop()


async def test_the_end_of_an_engine_is_no_error_of_its_gateways(
    models: RandomModels, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An engine that ends while a gateway has no call tells it so: gRPC writes no line about a lost connection."""
    server = EngineServer(models.engine().engine, f"unix:{tmp_path}/engine.sock")
    await server.start()
    client = GrpcEngineClient(f"unix:{tmp_path}/engine.sock")
    await client.stats()

    await server.stop()
    with pytest.raises(Unavailable):
        await client.stats()
    await client.close()

    assert "goaway" not in capfd.readouterr().err.lower()


class LostRunner(RunnerAround):
    """A runner whose device was lost."""

    def launch(self, plan: StepPlan) -> Flight:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def recover(self) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


async def test_an_engine_whose_loop_ends_by_an_error_says_so(models: RandomModels, tmp_path: Path) -> None:
    """If the loop's thread ends by an error, the server reports it, so that the process ends."""
    engine = models.engine().engine
    server = EngineServer(engine, f"unix:{tmp_path}/engine.sock")
    await server.start()

    def fail(stats: EngineStats) -> None:
        raise ZeroDivisionError(stats.steps)

    engine.loop.inbox.put(ReadStats(fail))
    await asyncio.wait_for(server.has_died.wait(), 60)

    assert server.death is not None
    assert server.death.exit_status == 1
    await server.stop()


async def test_an_engine_that_lost_its_device_ends_with_a_status_of_its_own(
    models: RandomModels, tmp_path: Path
) -> None:
    """If the device can compute nothing after a failed step, the engine's process must end with exit status 75."""
    engine = models.engine().engine
    engine.loop.steps.runner = LostRunner(engine.runner)
    server = EngineServer(engine, f"unix:{tmp_path}/engine.sock")
    await server.start()
    client = GrpcEngineClient(f"unix:{tmp_path}/engine.sock")

    running = asyncio.create_task(anext(client.generate(request([5, 6]))))
    await asyncio.wait_for(server.has_died.wait(), 60)

    assert server.death is not None
    assert server.death.exit_status == 75
    await server.stop()
    await asyncio.gather(running, return_exceptions=True)
    await client.close()
