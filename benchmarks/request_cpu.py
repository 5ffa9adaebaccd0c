"""What a whole request of one token costs a gateway: milliseconds of CPU, user and system, of its process.

    python benchmarks/request_cpu.py [--checkout DIR ...] [--requests 200] [--rounds 6] [--profile FILE] [--json OUT]

Starts a real `graftwork gateway` of each checkout against a scripted engine in another process (`scripted_engine.py`),
which answers each request with one token at once. One client sends one request after another on one connection, and the
gateway's CPU time is read before and after each block of `--requests`:

    CPU a request = (CPU over the block - CPU of an idle gateway for as many seconds) / requests

So all is in it: HTTP, the key, the quotas, the template, the tokens, the wire to the engine, the answer, the ledger and
the metrics. An idle gateway's timers are measured between the blocks and taken off. Kinds: `chat` is a chat completion,
`stream` is the same as a stream, `turn` is the first
turn of a session, stored in SQLite.

    holds if: the median of `chat` and of `stream` is below 3 ms

With `--profile FILE`, the first checkout runs under cProfile, which makes it slower, and its figures are written to FILE
(`python -m pstats FILE`).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from gateway_cpu import process_clock
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from server_processes import OWN_ROOT, Checkout, RunningGateway, Script, gateway_over_script, make_tenant

_KINDS = ("chat", "stream", "turn")
_WARM_UP = 30
_IDLE_S = 2.0
_LIMIT_MS = 3.0
_PROMPT = "Tell me about the harbour."
_PROFILE = """
import atexit, cProfile
profile = cProfile.Profile()
profile.enable()
atexit.register(lambda: (profile.disable(), profile.dump_stats({path!r})))
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One block of requests."""

    checkout: str
    kind: str
    round_number: int
    request_ms: float
    """CPU a request, without an idle gateway's."""
    answer_ms: float
    """From a request's start to its answer's end, on average."""
    idle_share: float
    """Of a core, by the idle gateway just before."""


class Gateway:
    """One gateway under measurement, and the connection of its client."""

    def __init__(self, checkout: Checkout, running: RunningGateway) -> None:
        self.name = checkout.name
        self._clock = process_clock(running.process_id)
        headers = {"authorization": f"Bearer {make_tenant(running.url, running.admin_key)}"}
        self._client = httpx.Client(base_url=running.url, headers=headers, trust_env=False, timeout=30)
        self._model = self._client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def send(self, kind: str, paths: Sequence[str]) -> None:
        """Sends requests of one kind, one after another."""
        messages = [{"role": "user", "content": _PROMPT}]
        body = {"model": self._model, "messages": messages, "max_tokens": 1, "stream": kind == "stream"}
        if kind == "turn":
            body = {"input": _PROMPT}
        for path in paths:
            answer = self._client.post(path, json=body).raise_for_status()
            assert kind != "stream" or answer.text.rstrip().endswith("[DONE]"), answer.text

    def paths(self, kind: str, count: int) -> list[str]:
        """Where the requests of a block go. Each turn is the first of a session, which is made here."""
        if kind != "turn":
            return ["/v1/chat/completions"] * count
        new = {"model": self._model, "sampling": {"max_tokens": 1}}
        made = [self._client.post("/v1/sessions", json=new).raise_for_status().json() for _ in range(count)]
        return [f"/v1/sessions/{each['id']}/turns" for each in made]

    def sample(self, kind: str, round_number: int, count: int) -> Sample:
        """Measures an idle gateway, then a block of requests."""
        paths = self.paths(kind, count)
        idle_share = self._cpu_s_of(lambda: time.sleep(_IDLE_S)) / _IDLE_S
        began_at = time.monotonic()
        used_s = self._cpu_s_of(lambda: self.send(kind, paths))
        seconds = time.monotonic() - began_at
        used_s -= idle_share * seconds
        return Sample(self.name, kind, round_number, used_s * 1000 / count, seconds * 1000 / count, idle_share)

    def _cpu_s_of(self, work: Callable[[], None]) -> float:
        before = time.clock_gettime(self._clock)
        work()
        return time.clock_gettime(self._clock) - before


def measure(gateways: Sequence[Gateway], arguments: argparse.Namespace) -> Iterator[Sample]:
    """All samples; the gateways take turns, and each round begins with another."""
    kinds = arguments.kinds.split(",")
    for gateway in gateways:
        for kind in kinds:
            gateway.send(kind, gateway.paths(kind, _WARM_UP))
    for round_number in range(arguments.rounds):
        first = round_number % len(gateways)
        for kind in kinds:
            for gateway in [*gateways[first:], *gateways[:first]]:
                yield gateway.sample(kind, round_number, arguments.requests)


def show(samples: Sequence[Sample]) -> bool:
    """Prints the figures; returns whether the goal is reached."""
    table = Table("kind", "checkout", "ms CPU a request: min", "median", "max", "ms to the answer", "idle: % of a core")
    holds = True
    for kind, name in dict.fromkeys((one.kind, one.checkout) for one in samples):
        own = [one for one in samples if (one.kind, one.checkout) == (kind, name)]
        times = [one.request_ms for one in own]
        idle = statistics.median(one.idle_share for one in own)
        answer_ms = statistics.median(one.answer_ms for one in own)
        figures = (f"{each:.2f}" for each in (min(times), statistics.median(times), max(times), answer_ms))
        table.add_row(kind, name, *figures, f"{idle:.1%}")
        holds &= kind == "turn" or statistics.median(times) < _LIMIT_MS
    console = Console(width=110)
    console.print(table)
    console.print("holds" if holds else f"does not hold: a request of one token costs more than {_LIMIT_MS:.0f} ms")
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, action="append", help="a tree to measure; may be repeated")
    parser.add_argument("--kinds", default=",".join(_KINDS), help="of chat, stream and turn, comma-separated")
    parser.add_argument("--requests", type=int, default=200, help="in a block")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--profile", type=Path, help="write a profile of the first checkout's gateway here")
    parser.add_argument("--json", type=Path, help="write every sample here")
    arguments = parser.parse_args()
    checkouts = [Checkout(root.absolute()) for root in arguments.checkout or [OWN_ROOT]]
    if arguments.profile:
        prelude = _PROFILE.format(path=str(arguments.profile.absolute()))
        checkouts[0] = Checkout(checkouts[0].root, "profiled", prelude)
    script = Script(together=1, step_ms=0.5)
    with ExitStack() as stack:
        gateways = [Gateway(each, stack.enter_context(gateway_over_script(each, script))) for each in checkouts]
        samples = list(measure(gateways, arguments))
    holds = show(samples)
    if arguments.json:
        record = {"machine": describe_machine(), "requests": arguments.requests}
        arguments.json.write_text(json.dumps(record | {"samples": [asdict(one) for one in samples]}, indent=1))
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
