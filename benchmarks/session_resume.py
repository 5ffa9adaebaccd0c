"""How soon a session speaks again, by where its KV has been: a turn of 16 new tokens behind 2,000 known ones.

    python benchmarks/session_resume.py [--rounds 5] [--history 2000] [--json OUT]

The yardstick's model on one thread. In every round a fresh session is computed, and the same turn is then taken from
each place, in an order that changes from round to round:

    recomputed   nothing is known of it
    device       it never left: the floor for all others
    host         it was suspended
    disk         its tenant's limits have moved it to files; they are read from the system's page cache
    cold disk    the same, and the page cache has been told to forget them
    sealed disk  as disk, with a key: the files are encrypted

Seconds are from the submission to the first token, on the wall clock. A ratio is the median of the ratios within
rounds: what else the machine does disturbs both sides of it. Every place must report the whole history from where it
is meant to be, and give the same token.
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from random import Random
from secrets import token_bytes
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from machine import describe_machine
from our_engine import MAX_BATCH_TOKENS, YardstickArtifacts, greedy_request
from yardstick_model import VOCAB_SIZE, ensure_model

from graftwork.engine.build.devices import keep_freed_memory
from graftwork.engine.build.engine import Engine, build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.events import CacheReport, PromptAdmitted, RequestOutput, TokensGenerated
from graftwork.engine.core.requests import (
    KV_KEY_BYTES,
    NO_KV_LIMITS,
    KvFileKey,
    KvLimits,
    SessionKey,
    SessionUse,
)
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory, SessionVerb
from graftwork.engine.core.stats import EngineStats
from graftwork.engine.messages import ReadStats, RunSessionCommand, Stop, SubmitRequest
from graftwork.platform.ids import IsolationDomain

PLACES = ("recomputed", "device", "host", "disk", "cold disk", "sealed disk")
NEEDED = {"host": 10.0, "disk": 4.0}
"""How many times faster than recomputing a resume must be; the program fails below that."""
_NEW_TOKENS = 16
_PAGE_TOKENS = 16
_NOTHING = KvLimits(device_bytes=0, host_bytes=0)


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn's first token."""

    token_id: int
    seconds: float
    cache: CacheReport


class Bench:
    """An engine with its loop on a thread, and one session at a time."""

    def __init__(self, engine: Engine, kv_folder: Path) -> None:
        """`kv_folder` is the engine's folder of KV files."""
        self._kv_folder = kv_folder
        self.kv_key: KvFileKey | None = None
        """The key of all that is asked and commanded next."""
        self._inbox = engine.loop.inbox
        self._thread = Thread(target=engine.loop.run, daemon=True)
        self._thread.start()

    def ask(
        self, prompt: list[int], domain: bytes, session: SessionUse | None, limits: KvLimits = NO_KV_LIMITS
    ) -> Answer:
        """One token. Raises whatever refused it."""
        outputs: SimpleQueue[tuple[float, list[RequestOutput]]] = SimpleQueue()
        request = replace(greedy_request(prompt, None, 1, domain), session=session, kv_limits=limits)
        request = replace(request, kv_key=self.kv_key)
        cache, token_id, seconds = CacheReport(), -1, 0.0
        started = time.perf_counter()
        self._inbox.put(SubmitRequest(request, lambda step: outputs.put((time.perf_counter(), step))))
        while True:
            at, step = outputs.get()
            for output in step:
                match output.event:
                    case PromptAdmitted():
                        cache = output.event.cache
                    case TokensGenerated():
                        token_id, seconds = output.event.token_ids[0], at - started
                    case Exception():
                        raise output.event
                if output.is_last:
                    return Answer(token_id, seconds, cache)

    def command(self, verb: SessionVerb, tokens: list[int], domain: bytes) -> SessionMemory:
        """One verb on the session."""
        answers: SimpleQueue[SessionMemory] = SimpleQueue()
        of = SessionKey("session"), IsolationDomain(domain), (), tuple(tokens)
        command = SessionCommand(verb, *of, kv_key=self.kv_key)
        self._inbox.put(RunSessionCommand(command, answers.put))
        return answers.get()

    def rest(self) -> None:
        """Until no copy is under way."""
        answers: SimpleQueue[EngineStats] = SimpleQueue()
        while True:
            self._inbox.put(ReadStats(answers.put))
            stats = answers.get()
            if not stats.in_flight_pages + stats.host_in_flight_pages:
                return
            time.sleep(0.001)

    def bring_to(self, place: str, tokens: list[int], domain: bytes) -> None:
        """Leave the session's KV there and nowhere nearer."""
        self.command(SessionVerb.HOLD, tokens, domain)
        self.rest()
        if place == "host":
            self.command(SessionVerb.SUSPEND, tokens, domain)
        elif place in ("disk", "cold disk"):
            self.ask([1], domain, None, _NOTHING)
        self.rest()
        if place == "cold disk":
            for path in self._kv_folder.iterdir():
                _forget(path)

    def close(self) -> None:
        self._inbox.put(Stop())
        self._thread.join()


def yardstick_engine(base: Path, folder: Path) -> Engine:
    """An engine of one thread on the CPU, with files of KV in `folder`/kv."""
    config = EngineConfig(
        model=base,
        device="cpu",
        dtype="bfloat16",
        threads=1,
        max_batch_tokens=MAX_BATCH_TOKENS,
        disk_kv_bytes=2**30,
        kv_folder=folder / "kv",
    )
    keep_freed_memory()  # as every engine process does
    return build_engine(config, YardstickArtifacts([], folder).source)


def _forget(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measure_round(bench: Bench, number: int, history_tokens: int, *, is_exact: bool = True) -> dict[str, float]:
    """Seconds to the first token from every place. Raises SystemExit where an answer is not what it must be.

    Without `is_exact` the token may differ: a GPU rounds a product of few rows otherwise than one of many.
    """
    random = Random(number)
    known = [random.randrange(VOCAB_SIZE) for _ in range(history_tokens)]
    prompt = known + [random.randrange(VOCAB_SIZE) for _ in range(_NEW_TOKENS)]
    domain, use = token_bytes(8), SessionUse(SessionKey("session"), history_tokens)
    expected = bench.ask(prompt, domain, use).token_id
    seconds: dict[str, float] = {}
    first = number % len(PLACES)
    for place in [*PLACES[first:], *PLACES[:first]]:
        if place == "recomputed":
            answer = bench.ask(prompt, token_bytes(8), None)
        elif place == "sealed disk":
            answer = _from_sealed_disk(bench, prompt, use)
        else:
            bench.bring_to(place, prompt, domain)
            answer = bench.ask(prompt, domain, use)
        _check(place, answer, expected if is_exact else answer.token_id, history_tokens)
        seconds[place] = answer.seconds
    bench.command(SessionVerb.CLOSE, prompt, domain)
    return seconds


def _from_sealed_disk(bench: Bench, prompt: list[int], use: SessionUse) -> Answer:
    """The turn of a domain with a key, whose files are encrypted."""
    domain, bench.kv_key = token_bytes(8), KvFileKey(token_bytes(KV_KEY_BYTES))
    bench.ask(prompt, domain, use)
    bench.bring_to("disk", prompt, domain)
    answer = bench.ask(prompt, domain, use)
    bench.command(SessionVerb.CLOSE, prompt, domain)
    bench.kv_key = None
    return answer


def _check(place: str, answer: Answer, expected: int, history_tokens: int) -> None:
    cache = answer.cache
    found = {"recomputed": 0, "device": cache.device_tokens, "host": cache.host_tokens}.get(place, cache.disk_tokens)
    least = 0 if place == "recomputed" else history_tokens - _PAGE_TOKENS
    if answer.token_id != expected or found < least or (place == "recomputed" and cache.cached_tokens):
        sys.exit(f"{place}: token {answer.token_id} where {expected} was expected, and {cache}")


def ratios_of(rounds: list[dict[str, float]], place: str) -> list[float]:
    """How many times faster than recomputing, round by round."""
    return [one["recomputed"] / one[place] for one in rounds]


def show(rounds: list[dict[str, float]], history_tokens: int) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"first token of a turn behind {history_tokens} known tokens, {len(rounds)} rounds"
    table = Table("KV from", "ms", "spread", "× faster", "spread", "needed", title=title)
    for place in PLACES:
        taken = sorted(one[place] * 1e3 for one in rounds)
        ratios = sorted(ratios_of(rounds, place))
        table.add_row(
            place,
            f"{statistics.median(taken):.1f}",
            f"{taken[0]:.1f} … {taken[-1]:.1f}",
            f"{statistics.median(ratios):.1f}",
            f"{ratios[0]:.1f} … {ratios[-1]:.1f}",
            f"{NEEDED[place]:.0f}" if place in NEEDED else "",
        )
    Console().print(table)


def main() -> int:
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")  # peft 0.21 asks transformers 5 for it
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--history", type=int, default=2000, help="tokens that are known; at most 2,030")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "graftwork-bench")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; else where temporary files go")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    model = ensure_model(options.cache)
    with TemporaryDirectory(dir=options.folder) as folder:
        bench = Bench(yardstick_engine(model.base, Path(folder)), Path(folder) / "kv")
        measure_round(bench, 0, options.history)  # warms up
        rounds = [measure_round(bench, number, options.history) for number in range(1, options.rounds + 1)]
        bench.close()
    show(rounds, options.history)
    if options.json:
        record: dict[str, Any] = {"machine": describe_machine(), "history_tokens": options.history, "rounds": rounds}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(statistics.median(ratios_of(rounds, place)) < times for place, times in NEEDED.items()))


if __name__ == "__main__":
    sys.exit(main())
