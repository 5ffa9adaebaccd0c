"""Compiles grammars and caches the results.

GrammarCompiler alone says whether a grammar is ready. Each source (a grammar's text) is compiled once for each isolation
domain (group of callers) that asks for it. A public grammar, which the operator declares, is compiled once for all. The
time of a compile is charged to the domain that asked first: each domain has a budget of compile time. The compile
server does the work, and its results return to the engine loop as messages. Refusals are cached too, so that a hostile grammar is compiled only once.
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
from graftwork.engine.grammar.compile.compile_budget import CompileBudget
from graftwork.engine.grammar.compile.compile_client import CompileClient
from graftwork.engine.grammar.compile.compile_jobs import BUSY, CompileAnswer, CompileJob
from graftwork.engine.grammar.compile.grammar_cache import GrammarCache, GrammarKey, PublicGrammars
from graftwork.engine.grammar.matching.backends import Backends
from graftwork.engine.grammar.matching.cursor import Speller
from graftwork.engine.grammar.matching.matcher import CompiledPair
from graftwork.engine.grammar.matching.vocabulary import Vocabulary
from graftwork.engine.grammar.schema.limits import CompileLimits
from graftwork.platform.clock import Clock
from graftwork.platform.errors import CapacityContended, GraftworkError, InternalFailure, InvalidRequest

_log = logging.getLogger(__name__)

_NO_PUBLIC = PublicGrammars()
_PASSING = (InternalFailure, CapacityContended)
"""Errors whose cause is not the grammar. A second compile may succeed."""


@dataclass(frozen=True, slots=True)
class GrammarCompiled:
    """The message with which the result of a compile reaches the engine loop."""

    key: GrammarKey
    seconds: float
    outcome: CompiledPair | GraftworkError


@dataclass(slots=True)
class _Job:
    key: GrammarKey
    source: GrammarSource
    domain: str


class GrammarCompiler:
    """Compiles and caches grammars. Only the engine loop's thread calls it; results are delivered on other threads."""

    def __init__(
        self,
        folder: Path,
        vocabulary: Vocabulary,
        limits: CompileLimits,
        deliver: Callable[[GrammarCompiled], None],
        clock: Clock,
        public: PublicGrammars = _NO_PUBLIC,
    ) -> None:
        """`deliver` is called on another thread and must pass the message to the loop."""
        self._vocabulary = vocabulary
        self._limits = limits
        self._deliver = deliver
        self._backends = Backends(vocabulary)
        self._server = CompileClient(folder, vocabulary, limits.niceness, self._answered)
        self._loading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-load")
        self._budget = CompileBudget(limits.domain_seconds_per_minute, clock)
        self._ready = GrammarCache(limits)
        self._public = public
        self._queued: OrderedDict[GrammarKey, _Job] = OrderedDict()
        self._running: dict[GrammarKey, _Job] = {}
        self._keys_by_number: dict[int, GrammarKey] = {}
        self._shown_failures: list[GrammarKey] = []
        self._numbers = count(1)
        self.speller = Speller(vocabulary)
        self.num_compiles = 0

    def key(self, source: GrammarSource, domain: str) -> GrammarKey:
        """Returns the cache key of a grammar: the isolation domain (group of callers) that may find it, and a hash of
        its text and of everything else that the compiled grammar depends on.
        """
        parts = [source.kind, source.text, str(source.strict), self._vocabulary.fingerprint, *_versions()]
        digest = hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()
        return GrammarKey(None if source in self._public else domain, digest)

    @property
    def num_bytes(self) -> int:
        """Bytes of all cached results."""
        return self._ready.num_bytes

    @property
    def server_pid(self) -> int | None:
        """The process id of the compile server; None while no server runs."""
        return self._server.pid

    # ---- asking -----------------------------------------------------------------------------------------------

    def forget_failures(self) -> None:
        """Removes from the cache the failures whose cause was the compile server or a busy machine, and not the
        grammar.

        The engine loop calls this in every iteration. A failure stays until the second call after it was cached, so
        that the waiting requests get their errors first. A later request compiles the grammar again.
        """
        for key in self._shown_failures:
            if isinstance(self._ready.peek(key), _PASSING):  # unless it was dropped from the cache meanwhile
                self._ready.drop(key)
        self._shown_failures = [key for key in self._ready if isinstance(self._ready.peek(key), _PASSING)]

    def want(self, key: GrammarKey, source: GrammarSource, domain: str) -> GraftworkError | None:
        """Queues a grammar for compiling, unless it is cached, queued or being compiled already.

        `domain` is the isolation domain (group of callers) that pays for the compile. Returns an error if this domain
        has used up its compile time, or has too many grammars in the queue. Returns None if there is no error.
        """
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
        """Returns the compiled grammar, or the error with which its compile ended. None while the compile has not
        ended.
        """
        return self._ready.get(key)

    def forget_domain(self, domain: str) -> None:
        """Drops the cached results of an isolation domain (group of callers)."""
        for key in [key for key in self._ready if key.domain == domain]:
            self._ready.drop(key)

    def close(self) -> None:
        """Stops the compile server, and ends the compiler's own threads."""
        self._server.close()
        self._loading.shutdown(wait=True, cancel_futures=True)

    def check_integrity(self) -> None:
        self._ready.check_integrity()
        assert not self._queued.keys() & self._running.keys()
        assert not set(self._ready) & (self._queued.keys() | self._running.keys())

    # ---- compiling --------------------------------------------------------------------------------------------

    def _start_next(self) -> None:
        """Starts queued jobs, at most one of each domain at a time, so that a domain with many jobs does not delay the
        others.
        """
        while self._server.has_room:
            busy = {job.domain for job in self._running.values()}
            job = next((job for job in self._queued.values() if job.domain not in busy), None)
            if job is None:
                return
            del self._queued[job.key]
            self._running[job.key] = job
            number = next(self._numbers)
            self._keys_by_number[number] = job.key
            limits = self._limits
            self._server.start(CompileJob(number, job.source, limits.seconds, limits.wall_seconds, limits.memory_bytes))

    def _answered(self, answer: CompileAnswer) -> None:
        """Passes an answer of the server to the loading thread.

        The compile client's reading thread calls this, and must not wait for a load.
        """
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
        if answer.code == "compile_server_died":
            return InternalFailure("The process that compiles grammars died. Send the request again.")
        return InvalidRequest(answer.refusal, param=answer.param, code=answer.code)

    def absorb(self, compiled: GrammarCompiled) -> None:
        """Caches the result of a compile, and starts the next queued compile."""
        job = self._running.pop(compiled.key)
        self._budget.charge(job.domain, compiled.seconds)
        self.num_compiles += 1
        self._ready.keep(compiled.key, compiled.outcome)
        self._start_next()


def _versions() -> tuple[str, ...]:
    return tuple(importlib.metadata.version(name) for name in ("xgrammar", "llguidance"))
