"""Compiled grammars by what they were compiled from: bounded, single-flight, and paid for by who asks.

GrammarCompiler alone says whether a grammar is ready. The work is done in the nursery; its ends come back to the loop
as messages. Refusals are kept as well as grammars, so that a hostile one costs its domain one compile and no more.
"""

import hashlib
import importlib.metadata
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from graftwork.engine.core.requests import GrammarSource
from graftwork.engine.grammar.compile.compile_client import CompileClient
from graftwork.engine.grammar.compile.compile_jobs import BUSY, CompileAnswer, CompileJob
from graftwork.engine.grammar.compile.tenant_budget import CompileBudget
from graftwork.engine.grammar.matching.backends import Backends
from graftwork.engine.grammar.matching.drafts import Speller
from graftwork.engine.grammar.matching.matcher import CompiledPair
from graftwork.engine.grammar.matching.vocabulary import Vocabulary
from graftwork.engine.grammar.schema.limits import CompileLimits
from graftwork.platform.clock import Clock
from graftwork.platform.errors import CapacityContended, GraftworkError, InternalFailure, InvalidRequest

_log = logging.getLogger(__name__)

GrammarKey = str
_PASSING = (InternalFailure, CapacityContended)
"""What says nothing of a grammar, and may be otherwise the next time."""


@dataclass(frozen=True, slots=True)
class GrammarCompiled:
    """The end of a compile, on its way to the loop."""

    key: GrammarKey
    seconds: float
    outcome: CompiledPair | GraftworkError


@dataclass(slots=True)
class _Job:
    key: GrammarKey
    source: GrammarSource
    domain: str


class GrammarCompiler:
    """All methods are called by the loop's thread, but for the delivery of what has ended."""

    def __init__(
        self,
        folder: Path,
        vocabulary: Vocabulary,
        limits: CompileLimits,
        deliver: Callable[[GrammarCompiled], None],
        clock: Clock,
    ) -> None:
        """`deliver` is called on another thread and must hand the event over to the loop."""
        self._vocabulary = vocabulary
        self._limits = limits
        self._deliver = deliver
        self._backends = Backends(vocabulary)
        self._nursery = CompileClient(folder, vocabulary, limits.niceness, self._answered)
        self._loading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-load")
        self._budget = CompileBudget(limits.domain_seconds_per_minute, clock)
        self._ready: OrderedDict[GrammarKey, CompiledPair | GraftworkError] = OrderedDict()
        self._queued: OrderedDict[GrammarKey, _Job] = OrderedDict()
        self._running: dict[GrammarKey, _Job] = {}
        self._keys_by_number: dict[int, GrammarKey] = {}
        self._shown_failures: list[GrammarKey] = []
        self._numbers = count(1)
        self.speller = Speller(vocabulary)
        self.num_bytes = 0
        self.num_compiles = 0

    def key(self, source: GrammarSource) -> GrammarKey:
        """What a compiled grammar depends on."""
        parts = [source.kind, source.text, str(source.strict), self._vocabulary.fingerprint, *_versions()]
        return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()

    @property
    def server_pid(self) -> int | None:
        """The process that compiles; None while there is none."""
        return self._nursery.pid

    # ---- asking -----------------------------------------------------------------------------------------------

    def forget_failures(self) -> None:
        """Called once a round: what failed by our own fault is told to those who wait, and tried again afterwards."""
        for key in self._shown_failures:
            if isinstance(self._ready.get(key), _PASSING):  # unless it has made way meanwhile
                self.num_bytes -= _weight(self._ready.pop(key))
        self._shown_failures = [key for key, outcome in self._ready.items() if isinstance(outcome, _PASSING)]

    def want(self, key: GrammarKey, source: GrammarSource, domain: str) -> GraftworkError | None:
        """Have a grammar compiled, unless it is or is being; returns why the domain must wait, where it must."""
        if key in self._ready or key in self._queued or key in self._running:
            return None
        retry_after_s = self._budget.seconds_until_credit(domain)
        if retry_after_s > 0:
            return CapacityContended(
                "Your grammars have used up the time for compiling. Reuse grammars, or simplify them.",
                code="grammar_budget_spent",
                retry_after_s=retry_after_s,
            )
        if sum(job.domain == domain for job in self._queued.values()) >= self._limits.domain_queue:
            return CapacityContended(
                f"{self._limits.domain_queue} of your grammars wait to be compiled. Try again later.",
                code="grammar_queue_full",
                retry_after_s=self._limits.seconds,
            )
        self._queued[key] = _Job(key, source, domain)
        self._start_next()
        return None

    def get(self, key: GrammarKey) -> CompiledPair | GraftworkError | None:
        """A grammar, or why there is none; None while that is not known."""
        found = self._ready.get(key)
        if found is not None:
            self._ready.move_to_end(key)
        return found

    def close(self) -> None:
        """End the nursery and the threads."""
        self._nursery.close()
        self._loading.shutdown(wait=True, cancel_futures=True)

    def check_integrity(self) -> None:
        assert self.num_bytes == sum(map(_weight, self._ready.values()))
        assert not self._queued.keys() & self._running.keys()
        assert not self._ready.keys() & (self._queued.keys() | self._running.keys())

    # ---- compiling --------------------------------------------------------------------------------------------

    def _start_next(self) -> None:
        """One grammar of a domain at a time, so that a flood of one domain's holds up no other's."""
        while self._nursery.has_room:
            busy = {job.domain for job in self._running.values()}
            job = next((job for job in self._queued.values() if job.domain not in busy), None)
            if job is None:
                return
            del self._queued[job.key]
            self._running[job.key] = job
            number = next(self._numbers)
            self._keys_by_number[number] = job.key
            limits = self._limits
            self._nursery.start(
                CompileJob(number, job.source, limits.seconds, limits.wall_seconds, limits.memory_bytes)
            )

    def _answered(self, answer: CompileAnswer) -> None:
        """On the nursery's thread: what remains to be done takes a thread too."""
        try:
            self._loading.submit(self._load, answer)
        except RuntimeError:  # closed meanwhile
            return

    def _load(self, answer: CompileAnswer) -> None:
        outcome: CompiledPair | GraftworkError
        try:
            outcome = self._loaded(answer)
        except Exception as error:  # noqa: BLE001 - whatever a load meets, it is the failure of that grammar alone
            _log.exception("grammar_load_failed")
            outcome = InternalFailure(f"The grammar could not be loaded: {type(error).__name__}.")
        self._deliver(GrammarCompiled(self._keys_by_number.pop(answer.number), answer.seconds, outcome))

    def _loaded(self, answer: CompileAnswer) -> CompiledPair | GraftworkError:
        if answer.engine is not None:
            backend = self._backends.of(answer.engine)
            return CompiledPair(backend.load(answer.payload), backend.load(answer.compact) if answer.compact else None)
        if answer.code == BUSY:
            return CapacityContended(
                "The machine was too busy to compile this grammar in time. Send the request again.",
                code="grammar_not_reached",
                retry_after_s=self._limits.seconds,
            )
        if answer.code == "nursery_died":
            return InternalFailure("The process that compiles grammars died. Send the request again.")
        return InvalidRequest(answer.refusal, param=answer.param, code=answer.code)

    def absorb(self, compiled: GrammarCompiled) -> None:
        """Take the end of a compile in, and start the next."""
        job = self._running.pop(compiled.key)
        self._budget.charge(job.domain, compiled.seconds)
        self.num_compiles += 1
        self._keep(compiled.key, compiled.outcome)
        self._start_next()

    def _keep(self, key: GrammarKey, outcome: CompiledPair | GraftworkError) -> None:
        """Least recently used goes first; matchers that are in use keep what they need alive."""
        self._ready[key] = outcome
        self.num_bytes += _weight(outcome)
        while len(self._ready) > 1 and (
            self.num_bytes > self._limits.cache_bytes or len(self._ready) > self._limits.cache_entries
        ):
            _, dropped = self._ready.popitem(last=False)
            self.num_bytes -= _weight(dropped)


def _weight(outcome: CompiledPair | GraftworkError) -> int:
    return 1024 if isinstance(outcome, GraftworkError) else outcome.num_bytes


def _versions() -> tuple[str, ...]:
    return tuple(importlib.metadata.version(name) for name in ("xgrammar", "llguidance"))
