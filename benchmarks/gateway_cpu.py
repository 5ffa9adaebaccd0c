"""What a streamed token costs a gateway: microseconds of CPU, user and system, of its whole process.

    python benchmarks/gateway_cpu.py [--checkout DIR ...] [--engines N ...] [--each] [--parts N] [--kinds chat,turns]
        [--engine unix|tcp] [--rounds 5] [--bare] [--trace] [--json OUT]

Starts a real `graftwork gateway` of each checkout against a scripted engine in another process (`scripted_engine.py`),
which answers 32 streams with one token each in every step. Clients are plain sockets in this process. While all streams
run, the gateway's CPU time is read twice, `--tokens` steps apart:

    CPU a token = CPU between the readings / (streams x steps between the readings)

so what a request costs before its first token and after its last is left out. Checkouts take turns within each round.
At `--engine unix`, as in `graftwork serve`, a gateway that knows the output socket reads the tokens from it; at `tcp`, as
with an engine on another machine, they come over gRPC.
With `--trace`, the last checkout is measured a second time, with requests that ask for a trace (`x-graftwork-trace: 1`).
With `--bare`, the first measured gateway is the first checkout with the tracer, the stages and the timed writes cut out of
the program, so that the others show what tracing costs.
`--engines 1 --engines 2` compares a gateway with one engine and one whose streams are spread over two. Two engines send
twice as many messages for as many tokens; `--parts 2` also measures one engine that does the same. With `--each`, every
engine has all 32 streams, so its messages have as many tokens as those of one engine.
`chat` is POST /v1/chat/completions with stream; `turns` is POST /v1/sessions/{id}/turns with stream, stored in SQLite.
The ratio to the first checkout is taken within each round. Its median over all rounds has an interval in which it lies
with 95 % probability (bootstrap over rounds), so many short rounds (`--rounds 60 --tokens 64`) can show a difference of
one per cent.
On a busy machine run it with real-time priority (`chrt -f 5`), or late readings of the engine's messages join steps.
"""

import argparse
import asyncio
import json
import random
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from server_processes import OWN_ROOT, Checkout, RunningGateway, Script, gateway_over_script, make_tenant

_WARM_STEPS = 16
"""Made before the first reading."""
_REST_STEPS = 40
"""Made after the second: several engines are not in step."""
_POLL_S = 0.004
_BURST_S = 0.25
_RESAMPLED = 4000
_ENGINE_LOOKS = 100
_RECEIVE_BYTES = 4 << 20
_PROMPT = "Tell me about the harbour."
_BARE = """
from graftwork.api.http import streaming
from graftwork.platform.tracing.request_trace import RequestTrace
from graftwork.sessions.generation.tracer import GenerationTracer
streaming.timed_write = lambda trace, write: write
GenerationTracer._measure_next = lambda self: None
for name in ("mark", "describe", "settle", "keep"):
    setattr(RequestTrace, name, lambda self, *arguments: None)
for name in ("admitted", "first_token", "ended", "log_tokens", "count"):
    setattr(GenerationTracer, name, lambda self, *arguments: None)
"""
"""Cuts tracing out of a gateway, before it starts."""
_ENDS = {"chat": b"data: [DONE]", "turns": b"event: turn.completed"}
"""What a whole stream has near its end."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of all streams."""

    checkout: str
    kind: str
    round_number: int
    token_us: float
    """CPU a token."""


class Gateway:
    """One gateway under measurement."""

    def __init__(
        self, checkout: Checkout, running: RunningGateway, name: str, script: Script, *, traces: bool = False
    ) -> None:
        self.name = name
        self.streams = script.together
        self._step_s = script.step_ms / 1000
        self._headers = "x-graftwork-trace: 1\r\n" if traces else ""
        self._steps = running.folder / "steps"
        self._process = psutil.Process(running.process_id)
        self._port = running.port
        self._key = make_tenant(running.url, running.admin_key)
        self._wait_for_engines(running)
        self.model = self._client().get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def _wait_for_engines(self, running: RunningGateway) -> None:
        """A gateway answers when one of its engines does."""
        headers = {"authorization": f"Bearer {running.admin_key}"}
        for _ in range(_ENGINE_LOOKS):
            found = httpx.get(f"{running.url}/v1/admin/replicas", headers=headers, trust_env=False).json()["data"]
            if all(one["status"] == "ready" for one in found):
                return
            time.sleep(_BURST_S)
        raise SystemExit(f"{self.name}: not all engines are ready: {found}")

    def cpu_s(self) -> float:
        """User and system, in nanoseconds' steps where Linux has a clock for other processes."""
        if sys.platform == "linux":
            return time.clock_gettime(process_clock(self._process.pid))
        times = self._process.cpu_times()
        return float(times.user + times.system)

    async def run(self, kind: str, steps: int) -> float:
        """Seconds of CPU a token, over `steps` steps of all streams at once."""
        requests = [self._request(kind, _WARM_STEPS + steps + _REST_STEPS) for _ in range(self.streams)]
        before = self._num_steps()
        answers = [asyncio.create_task(self._exchange(request)) for request in requests]
        first_step, first_s = await self._reading(before + _WARM_STEPS, answers)
        last_step, last_s = await self._reading(first_step + steps, answers)
        for answer in await asyncio.gather(*answers):
            if _ENDS[kind] not in answer[-2000:]:
                raise SystemExit(f"{self.name}: a stream of {kind} broke off:\n{answer[-500:]!r}")
        return (last_s - first_s) / (self.streams * (last_step - first_step))

    async def _reading(self, step: int, answers: Sequence[asyncio.Task[bytes]]) -> tuple[int, float]:
        """The engine's step and the CPU time, once that step is made. No answer may end before.

        Looks seldom while the step is far: each look takes the gateway's memory out of the caches that both use.
        """
        while (found := self._num_steps()) < step:
            if ended := [answer.result() for answer in answers if answer.done()]:
                raise SystemExit(f"{self.name}: a stream ended early:\n{ended[0][-500:]!r}")
            await asyncio.sleep(max(_POLL_S, (step - found) * self._step_s / 2))
        return found, self.cpu_s()

    def _num_steps(self) -> int:
        """The engine's steps so far. While the engine writes the file, it is empty for a moment."""
        if not self._steps.exists():
            return 0
        while not (found := self._steps.read_text()):
            pass
        return int(found)

    def _request(self, kind: str, tokens: int) -> bytes:
        """What is sent for one answer; a turn's session is made here, unmeasured."""
        if kind == "chat":
            messages = [{"role": "user", "content": _PROMPT}]
            body = {"model": self.model, "messages": messages, "stream": True, "max_tokens": tokens}
            return self._post("/v1/chat/completions", body)
        sampling = {"max_tokens": tokens, "ignore_eos": True}
        made = self._client().post("/v1/sessions", json={"model": self.model, "sampling": sampling})
        path = f"/v1/sessions/{made.raise_for_status().json()['id']}/turns"
        return self._post(path, {"input": _PROMPT, "stream": True})

    def _post(self, path: str, body: dict[str, object]) -> bytes:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {self._key}\r\nconnection: close\r\n"
        head += self._headers
        return f"{head}content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content

    async def _exchange(self, request: bytes) -> bytes:
        """Send a request and read its answer in bursts, so that nobody waits at the socket.

        A client on another machine costs a sender no wake-up; one that waits on this machine would, for every chunk.
        All clients read at the same moments, so that they seldom take the gateway's memory out of the caches.
        """
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            connection.connect(("127.0.0.1", self._port))
            connection.sendall(request)
            connection.setblocking(False)
            answer = b""
            while True:
                await asyncio.sleep(_BURST_S - time.monotonic() % _BURST_S)
                with suppress(BlockingIOError):
                    while piece := connection.recv(1 << 20):
                        answer += piece
                    return answer

    def _client(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {self._key}"}
        return httpx.Client(base_url=f"http://127.0.0.1:{self._port}", headers=headers, trust_env=False)


def process_clock(process_id: int) -> int:
    """The CPU clock of a whole process, as glibc's clock_getcpuclockid(3) makes it; psutil's ticks are of 10 ms."""
    return (~process_id << 3) | 2


@contextmanager
def running_gateway(
    checkout: Checkout, arguments: argparse.Namespace, engines: int, parts: int = 1, *, traces: bool = False
) -> Iterator[Gateway]:
    """A gateway and its scripted engines, over a data folder of their own. A step comes in `parts` messages."""
    name = f"{checkout.name}, {engines} engines" if engines > 1 else checkout.name
    name += " with all streams each" if engines > 1 and arguments.each else ""
    name += f", {parts} messages a step" if parts > 1 else ""
    streams = arguments.streams * engines if arguments.each else arguments.streams
    script = Script(streams, arguments.step_ms, engines, parts, over_tcp=arguments.engine == "tcp")
    with gateway_over_script(checkout, script) as running:
        name = f"{name}, traced" if traces else name
        yield Gateway(checkout, running, name, script, traces=traces)


async def measure(gateways: Sequence[Gateway], arguments: argparse.Namespace) -> list[Sample]:
    """All samples; the gateways take turns, and each round begins with another."""
    samples: list[Sample] = []
    kinds = arguments.kinds.split(",")
    for kind in kinds:
        for gateway in gateways:
            await gateway.run(kind, _WARM_STEPS)  # imports, caches, connections
    for round_number in range(arguments.rounds):
        first = round_number % len(gateways)
        for kind in kinds:
            for gateway in [*gateways[first:], *gateways[:first]]:
                token_s = await gateway.run(kind, arguments.tokens)
                samples.append(Sample(gateway.name, kind, round_number, token_s * 1e6))
    return samples


def show(samples: Sequence[Sample], names: Sequence[str], kinds: Sequence[str]) -> None:
    """Figures by kind and checkout; ratios are to the first checkout, within a round."""
    table = Table("kind", "checkout", "µs CPU a token: min", "median", "max", "ratio to first: median", "from", "to")
    for kind in kinds:
        for name in names:
            token_us = token_times(samples, kind, name)
            figures = (min(token_us), statistics.median(token_us), max(token_us))
            spread = ratio_to_first(samples, kind, name, names[0])
            table.add_row(kind, name, *(f"{figure:.1f}" for figure in figures), *(f"{one:.3f}" for one in spread))
    Console(width=120).print(table)


def token_times(samples: Sequence[Sample], kind: str, name: str) -> list[float]:
    """The microseconds of a checkout, by round."""
    return [sample.token_us for sample in samples if (sample.kind, sample.checkout) == (kind, name)]


def ratio_to_first(samples: Sequence[Sample], kind: str, name: str, first: str) -> tuple[float, float, float]:
    """The median over the rounds of the ratio to the first checkout, and the ends of its interval."""
    own, theirs = token_times(samples, kind, name), token_times(samples, kind, first)
    ratios = [one / other for one, other in zip(own, theirs, strict=True)]
    noise = random.Random(1)
    medians = sorted(statistics.median(noise.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLED))
    outside = round(_RESAMPLED * 0.025)
    return statistics.median(ratios), medians[outside], medians[-1 - outside]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, action="append", help="a tree to measure; may be repeated")
    parser.add_argument("--engines", type=int, action="append", help="engines of a gateway; may be repeated")
    parser.add_argument("--each", action="store_true", help="all streams at every engine, in place of over all engines")
    parser.add_argument("--parts", type=int, default=1, help="also measure one engine with so many messages a step")
    parser.add_argument("--kinds", default="chat,turns", help="of chat and turns, comma-separated")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="steps between the two readings")
    parser.add_argument("--step-ms", type=float, default=25.0, help="between two steps of the engine")
    parser.add_argument(
        "--engine", choices=("unix", "tcp"), default="unix", help="where the gateway reaches the engine"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bare", action="store_true", help="measure the first checkout without tracing as well")
    parser.add_argument("--trace", action="store_true", help="measure the last checkout with traced requests as well")
    parser.add_argument("--json", type=Path, help="write every sample here")
    arguments = parser.parse_args()
    checkouts = [Checkout(root.absolute()) for root in arguments.checkout or [OWN_ROOT]]
    if arguments.bare:
        checkouts.insert(0, Checkout(checkouts[0].root, "bare", _BARE))
    with ExitStack() as stack:
        shapes = [(engines, 1) for engines in arguments.engines or [1]]
        if arguments.parts > 1:
            shapes.append((1, arguments.parts))
        gateways = [
            stack.enter_context(running_gateway(checkout, arguments, engines, parts))
            for checkout in checkouts
            for engines, parts in shapes
        ]
        if arguments.trace:
            last = running_gateway(checkouts[-1], arguments, (arguments.engines or [1])[-1], traces=True)
            gateways.append(stack.enter_context(last))
        samples = asyncio.run(measure(gateways, arguments))
    show(samples, [gateway.name for gateway in gateways], arguments.kinds.split(","))
    if arguments.json:
        record = {
            "machine": describe_machine(),
            "step_ms": arguments.step_ms,
            "streams": arguments.streams,
            "streams_at_every_engine": arguments.each,
            "engine": arguments.engine,
            "ratio_to_first": {
                kind: {
                    gateway.name: dict(
                        zip(
                            ("median", "from", "to"),
                            ratio_to_first(samples, kind, gateway.name, gateways[0].name),
                            strict=True,
                        )
                    )
                    for gateway in gateways
                }
                for kind in arguments.kinds.split(",")
            },
        }
        arguments.json.write_text(json.dumps(record | {"samples": [asdict(sample) for sample in samples]}, indent=1))


if __name__ == "__main__":
    main()
