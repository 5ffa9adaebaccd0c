"""How fast one stream decodes when it is served, beside the engine alone.

    python benchmarks/one_stream.py [--checkout DIR ...] [--rounds 7] [--tokens 256] [--json OUT]

One greedy stream of the yardstick's model on one thread, without drafts, takes four ways:

    alone   the engine's loop in its own process, with a queue as the sink
    grpc    `graftwork engine`, and the gateway's client in another process, over a Unix-domain socket
    tcp     the same over TCP, as to an engine on another machine: outputs go through gRPC too
    http    `graftwork serve`, and a streamed chat over a plain socket

Each sample is two streams from prompts of 64 tokens, one to 1 token and one to `--tokens`. As in the yardstick,

    decode tokens/s  = (tokens - 1) / (t(tokens) - t(1))

Processor time is taken the same way, of the engine's process and, for `http`, of the gateway's. The ways and the
checkouts take turns within each round, and each round begins with another. Tokens of `alone`, `grpc` and `tcp` must be equal.

    holds if: median over rounds of http / alone >= 0.9

On a machine with other work, run it with `chrt -f 5`.
"""

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from cells import PROMPT_TOKENS
from engine_process import EngineProcess, EngineSpec
from machine import describe_machine
from peers.protocol import Task
from rich.console import Console
from rich.table import Table
from server_processes import OWN_ROOT, Checkout, ServerProcess, free_port, make_tenant
from yardstick_model import VOCAB_SIZE, ensure_model

_ADMIN_KEY = "gwa_benchmark_0123456789abcdef"
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # as a server starts its engine; for all ways alike
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
_LEAST_SHARE = 0.9
_WARM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Run:
    """One stream: seconds of the client's clock, and processor seconds of the engine and of the gateway."""

    wall_s: float
    engine_s: float
    gateway_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One way of one checkout in one round: milliseconds a decoded token."""

    checkout: str
    way: str
    round_number: int
    wall_ms: float
    engine_ms: float
    """Processor time of the engine's process."""
    gateway_ms: float
    """Processor time of the gateway's process; 0 without one."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to a stream. `run` takes a seed for the prompt and the number of tokens."""

    checkout: str
    name: str
    run: Callable[[int, int], Run]


class Bench:
    """The processes of one checkout. Ends them with `stack`."""

    def __init__(self, checkout: Checkout, model: Path, cache: Path, stack: ExitStack) -> None:
        self.checkout = checkout
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graftwork-bench-")))
        self._stack = stack
        self._environment = checkout.environment() | _HUGE_PAGES
        self._model = model
        variables = {"PYTHONPATH": str(checkout.package.parent)}
        self._alone = self._peer("alone", variables, cache)
        self._served = {
            "grpc": self._start_engine("grpc", f"unix:{self._folder / 'alone.sock'}", variables, cache),
            "tcp": self._start_engine("tcp", f"127.0.0.1:{free_port()}", variables, cache),
        }
        self._start_server()

    def ways(self) -> list[Way]:
        name = self.checkout.name
        return [
            Way(name, "alone", self._run_alone),
            *(Way(name, served, partial(self._run_served, served)) for served in self._served),
            Way(name, "http", self._run_http),
        ]

    def check(self) -> None:
        """Raises SystemExit if the engine says other tokens over gRPC than alone."""
        task = _task(-1, _WARM_TOKENS)
        expected = self._alone.run(task).token_ids
        for name, (_, client) in self._served.items():
            if client.run(task).token_ids != expected:
                raise SystemExit(f"{self.checkout.name}: the tokens over {name} are not those of the engine alone.")

    def _start_engine(
        self, name: str, listen: str, variables: dict[str, str], cache: Path
    ) -> tuple[ServerProcess, EngineProcess]:
        """An engine that listens at an address, and a client of it."""
        engine = self._start("engine", "--listen", listen, "--data-dir", str(self._folder / name), log=name)
        return engine, self._peer(name, variables | {"ONE_STREAM_ADDRESS": listen}, cache)

    def _start(self, command: str, *options: str, log: str = "serve") -> ServerProcess:
        arguments = [command, "--model", str(self._model / "base"), "--device", "cpu"]
        return self._stack.enter_context(
            ServerProcess(
                self.checkout.command(*arguments, "--max-draft-tokens", "0", *options),
                self._environment | {"GRAFTWORK_ADMIN_KEY": _ADMIN_KEY, "GRAFTWORK_LOG_LEVEL": "warning"},
                self._folder / f"{log}.log",
            )
        )

    def _start_server(self) -> None:
        self._port = free_port()
        server = self._start("serve", "--port", str(self._port), "--data-dir", str(self._folder / "serve"))
        url = f"http://127.0.0.1:{self._port}"
        server.wait_for_http(f"{url}/readyz")
        self._gateway = server.process_id
        (self._engine_of_http,) = (
            child.pid
            for child in psutil.Process(self._gateway).children()
            if "engine_process" in " ".join(child.cmdline())
        )
        self._key = make_tenant(url, _ADMIN_KEY)

    def _peer(self, name: str, variables: dict[str, str], cache: Path) -> EngineProcess:
        spec = EngineSpec(f"one-stream-{self.checkout.name}-{name}", "peers.one_stream_engine", variables=variables)
        return self._stack.enter_context(EngineProcess(spec, self._model, cache, None))

    def _run_alone(self, seed: int, tokens: int) -> Run:
        result = self._alone.run(_task(seed, tokens))
        return Run(result.seconds, result.cpu_seconds, 0.0)

    def _run_served(self, name: str, seed: int, tokens: int) -> Run:
        engine, client = self._served[name]
        engine_s = _cpu_s(engine.process_id)
        result = client.run(_task(seed, tokens))
        return Run(result.seconds, _cpu_s(engine.process_id) - engine_s, 0.0)

    def _run_http(self, seed: int, tokens: int) -> Run:
        before = _cpu_s(self._engine_of_http), _cpu_s(self._gateway)
        seconds = self._chat(seed, tokens)
        return Run(seconds, _cpu_s(self._engine_of_http) - before[0], _cpu_s(self._gateway) - before[1])

    def _chat(self, seed: int, tokens: int) -> float:
        """Seconds from the request to the end of the answer."""
        letters = "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=PROMPT_TOKENS))
        messages = [{"role": "user", "content": letters}]
        body = {"model": "base", "messages": messages, "stream": True, "max_tokens": tokens, "temperature": 0}
        content = json.dumps(body | {"ignore_eos": True, "stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {self._key}\r\n"
        head += f"connection: close\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            start = time.perf_counter()
            connection.sendall(head.encode() + content)
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            seconds = time.perf_counter() - start
        if f'"completion_tokens":{tokens}'.encode() not in answer or b"data: [DONE]" not in answer[-200:]:
            raise SystemExit(f"{self.checkout.name}: a chat broke off:\n{answer[-500:].decode(errors='replace')}")
        return seconds


def _task(seed: int, tokens: int) -> Task:
    source = random.Random(seed)
    return Task([[source.randrange(1, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]], [None], tokens)


def _cpu_s(process_id: int) -> float:
    """Processor time of a process, in nanoseconds' steps where Linux has a clock for other processes."""
    if sys.platform == "linux":
        return time.clock_gettime((~process_id << 3) | 2)  # as glibc's clock_getcpuclockid(3) makes it
    times = psutil.Process(process_id).cpu_times()
    return float(times.user + times.system)


def served_model(base: Path, folder: Path) -> Path:
    """A folder with the yardstick's model as `base`, which has a chat template there."""
    shutil.copytree(base, folder / "base", copy_function=os.symlink)
    settings = folder / "base" / "tokenizer_config.json"
    found = json.loads(settings.read_text())
    settings.unlink()  # a link into the cache
    settings.write_text(json.dumps(found | {"chat_template": _TEMPLATE}))
    (folder / "adapters").mkdir()
    return folder


def measure(ways: Sequence[Way], rounds: int, tokens: int) -> list[Sample]:
    for way in ways:
        way.run(-2, _WARM_TOKENS)
    samples = []
    for round_number in range(rounds):
        first = round_number % len(ways)
        for way in [*ways[first:], *ways[:first]]:
            short, long = way.run(2 * round_number, 1), way.run(2 * round_number + 1, tokens)
            differences = zip(asdict(long).values(), asdict(short).values(), strict=True)
            costs = ((more - less) / (tokens - 1) * 1e3 for more, less in differences)
            samples.append(Sample(way.checkout, way.name, round_number, *costs))
    return samples


def show(samples: Sequence[Sample], ways: Sequence[Way]) -> list[float]:
    """Prints the medians. Returns each checkout's share of http, in the order of the checkouts."""
    table = Table("checkout", "way", "tokens/s", "ms", "least", "most", "engine CPU ms", "gateway CPU ms", "of alone")
    shares = []
    for way in ways:
        own = [one for one in samples if (one.checkout, one.way) == (way.checkout, way.name)]
        alone = [one for one in samples if (one.checkout, one.way) == (way.checkout, "alone")]
        wall = [one.wall_ms for one in own]
        share = statistics.median(a.wall_ms / b.wall_ms for a, b in zip(alone, own, strict=True))
        middle = statistics.median(wall)
        costs = (statistics.median(one.engine_ms for one in own), statistics.median(one.gateway_ms for one in own))
        figures = (f"{one:.2f}" for one in (middle, min(wall), max(wall), *costs))
        table.add_row(way.checkout, way.name, f"{1e3 / middle:.0f}", *figures, f"{share:.3f}")
        if way.name == "http":
            shares.append(share)
    Console(width=120).print(table)
    return shares


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, action="append", help="a tree to measure; may be repeated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "graftwork-bench")
    parser.add_argument("--note", default="", help="kept with the figures")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    machine = describe_machine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graftwork-bench-")))
        model = served_model(ensure_model(arguments.cache).base, folder)
        roots = arguments.checkout or [OWN_ROOT]
        benches = [Bench(Checkout(root.absolute()), model, arguments.cache, stack) for root in roots]
        for bench in benches:
            bench.check()
        ways = [way for bench in benches for way in bench.ways()]
        samples = measure(ways, arguments.rounds, arguments.tokens)
    shares = show(samples, ways)
    if arguments.json is not None:
        record = {"machine": machine, "note": arguments.note, "samples": [asdict(one) for one in samples]}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if shares[-1] >= _LEAST_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
