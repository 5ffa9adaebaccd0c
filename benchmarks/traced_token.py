"""What tracing costs a token of a stream in a gateway, in caches as cold as a gateway finds them after each step.

    python -m benchmarks.traced_token [--streams 32] [--steps 250] [--rounds 3] [--json OUT]

Runs a gateway's application in this process, over an engine that says one token to each of its streams when it is told
to. Half of the streams are traced. Before each step of the one half or the other, 64 MiB are written, so the caches hold
nothing of the gateway; then the step's message is read from its bytes, and all streams write their events to nowhere:

    token = CPU of this thread from the message to the last event, divided by the streams

The halves take turns, so other work on the machine meets both. Of the plain steps, of those with a report of the engine's
steps, and of those after a report, whose tokens are measured, the lower quartile is taken: a busy machine only adds. What
the kernel does to send an event is left out, so the whole costs a part less than it says.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.machine import describe_machine

from graftwork.engine.core.events import CacheReport, EngineEvent, FinishReason, PromptAdmitted, RequestFinished
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.rpc import codec
from graftwork.engine.rpc import engine_pb2 as wire
from tests.api.fake_engine import FakeEngine
from tests.api.in_process_gateway import Gateway, chat, gateway_settings, open_gateway, write_model_folder
from tests.sessions.tokenizer_and_templates import text_tokenizer

_REPORT_EVERY = 40
"""Steps between two reports: a second, where a step takes 25 ms."""
_SPANS = 2
"""Of each report."""
_WARM_STEPS = 20
_TURNS = 4
"""Turns of the loop in which all readers run and write."""
_SETTLE_S = 0.002
_JUNK_BYTES = 64 << 20
_KINDS = ("plain", "report", "measured")


class ToldEngine(FakeEngine):
    """Says what is put into the queues of its requests."""

    queues: dict[bool, dict[str, asyncio.Queue[EngineEvent | None]]]
    """By whether the request is traced, and by its id."""
    written: int = 0
    """The events of all streams so far."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        queue = self.queues[request.traced][request.request_id] = asyncio.Queue()
        yield PromptAdmitted(CacheReport(recomputed_tokens=5))
        said = 0
        while (event := await queue.get()) is not None:
            said += 1
            yield event
        yield RequestFinished(FinishReason.LENGTH, said)


async def ask(gateway: Gateway, engine: ToldEngine, key: str, traced: bool) -> None:
    """Streams one chat, whose events go nowhere."""
    body = json.dumps(chat(stream=True, max_tokens=1000)).encode()
    head = {"authorization": f"Bearer {key}", "content-type": "application/json", "host": "bench"}
    head |= {"content-length": str(len(body)), "x-graftwork-trace": str(int(traced))}
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        for part in parts:
            return part
        return await asyncio.Event().wait()

    async def nowhere(_: Any) -> None:
        engine.written += 1

    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
    scope |= {"path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "query_string": b""}
    scope |= {"client": ("127.0.0.1", 1), "server": ("bench", 80), "state": {"write_body": nowhere}}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in head.items()]
    await gateway.app(scope, receive, nowhere)


def message(request_ids: list[str], token_id: int, with_report: bool) -> bytes:
    """A step's message as the engine sends it."""
    outputs = []
    for request_id in request_ids:
        tokens = wire.Tokens(token_ids=[token_id], kv_byte_seconds=1000, engine_us=20)
        outputs.append(wire.RequestOutput(request_id=request_id, tokens=tokens))
        if with_report:
            span = wire.Span(name="decode", start_s=1.0, duration_s=0.5, steps=20, busy_s=0.4, tokens=20)
            traced = wire.Traced(run=1, sent_s=2.0, spans=[span] * _SPANS)
            outputs.append(wire.RequestOutput(request_id=request_id, traced=traced))
    return wire.StepOutput(outputs=outputs).SerializeToString()


async def measure(streams: int, steps: int) -> dict[tuple[bool, str], float]:
    """Microseconds of a token, by whether it is traced and by the kind of its step."""
    engine, junk = ToldEngine(), np.zeros(_JUNK_BYTES, dtype=np.uint8)
    engine.queues = {False: {}, True: {}}
    token_ids = text_tokenizer().encode("The weather in Paris is sunny and warm. " * steps, allow_special=False)
    found = defaultdict[tuple[bool, str], list[float]](list)
    with tempfile.TemporaryDirectory() as name:
        settings = gateway_settings(Path(name), write_model_folder(Path(name) / "tiny"))
        async with open_gateway(settings, None, engine) as gateway:
            key = (await gateway.tenant()).key
            asked = [
                asyncio.create_task(ask(gateway, engine, key, one)) for one in (False, True) for _ in range(streams)
            ]
            while min(map(len, engine.queues.values())) < streams:  # noqa: ASYNC110 - the engine has no event for it
                await asyncio.sleep(_SETTLE_S)
            for step in range(1, steps + 1):
                for traced in (False, True) if step % 2 else (True, False):
                    queues = engine.queues[traced]
                    content = message([*queues], token_ids[step], traced and step % _REPORT_EVERY == 0)
                    junk[::64] += 1
                    await asyncio.sleep(_SETTLE_S)
                    written, began_ns = engine.written, time.thread_time_ns()
                    for output in wire.StepOutput.FromString(content).outputs:
                        event = codec.event_from_wire(output)
                        assert not isinstance(event, Exception)
                        queues[output.request_id].put_nowait(event)
                    for _ in range(_TURNS):
                        await asyncio.sleep(0)
                    took_ns = time.thread_time_ns() - began_ns
                    kind = {0: "report", 1: "measured"}.get(step % _REPORT_EVERY, "plain")
                    if step > _WARM_STEPS:
                        assert engine.written - written == streams, "each stream writes one event in _TURNS turns"
                        found[traced, kind].append(took_ns / 1000 / streams)
            for queue in [queue for queues in engine.queues.values() for queue in queues.values()]:
                queue.put_nowait(None)
            await asyncio.gather(*asked)
    return {key: statistics.quantiles(values, n=4)[0] for key, values in found.items()}


def mean_us(found: dict[tuple[bool, str], float], traced: bool) -> float:
    """The mean of a token over the steps from one report to the next."""
    plain, report, measured = (found[traced, kind] for kind in _KINDS)
    return ((_REPORT_EVERY - 2) * plain + report + measured) / _REPORT_EVERY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32, help="traced ones, and as many that are not")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rounds = []
    for _ in range(arguments.rounds):
        found = asyncio.run(measure(arguments.streams, arguments.steps))
        off, on = mean_us(found, traced=False), mean_us(found, traced=True)
        kinds = {kind: {"untraced": found[False, kind], "traced": found[True, kind]} for kind in _KINDS}
        rounds.append({"untraced_us": off, "traced_us": on, "ratio": on / off, "kinds": kinds})
        parts = "  ".join(f"{kind} {one['untraced']:.1f} and {one['traced']:.1f}" for kind, one in kinds.items())
        print(f"{off:.2f} us untraced, {on:.2f} us traced: {on / off:.3f} times  ({parts})")
    print(f"median of the ratios: {statistics.median(one['ratio'] for one in rounds):.3f}")
    if arguments.json:
        record = {"benchmark": "traced_token", "machine": describe_machine(), "rounds": rounds}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
