"""Tests of the compiler and its server process: single flight, kill limits, budgets and a bounded cache."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.compile.compile_budget import CompileBudget
from graftwork.engine.grammar.compile.compiler import GrammarCompiled, GrammarCompiler
from graftwork.engine.grammar.compile.grammar_cache import PublicGrammars
from graftwork.engine.grammar.matching.vocabulary import read_vocabulary
from graftwork.engine.grammar.schema.limits import CompileLimits
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import CapacityContended, GraftworkError, InternalFailure, InvalidRequest

MODEL = Path(__file__).parents[4] / "demo" / "model"
WITHIN_S = 60
LIMITS = CompileLimits(seconds=1.0, wall_seconds=40.0, niceness=0)  # what is asserted must not wait for idle cores
EXPLODING = "\n".join([*(f'r{n} ::= r{n + 1} r{n + 1} | "a"' for n in range(2000)), 'r2000 ::= "b"', "root ::= r0"])


class CompilerDriver:
    """A compiler, and the calls that the engine's loop makes on it."""

    def __init__(self, limits: CompileLimits = LIMITS, public: PublicGrammars | None = None) -> None:
        vocabulary = read_vocabulary(MODEL, 1024, (1017,))
        assert vocabulary is not None
        self.clock = ManualClock()
        self.inbox: SimpleQueue[GrammarCompiled] = SimpleQueue()
        self.compiler = GrammarCompiler(
            MODEL, vocabulary, limits, self.inbox.put, self.clock, public or PublicGrammars()
        )

    def ask(self, source: GrammarSource, domain: str = "domain") -> GraftworkError | None:
        return self.compiler.want(self.compiler.key(source, domain), source, domain)

    def absorb(self) -> GrammarCompiled:
        """The next end of a compile."""
        compiled = self.inbox.get(timeout=WITHIN_S)
        self.compiler.absorb(compiled)
        self.compiler.check_integrity()
        return compiled

    @property
    def server_pid(self) -> int:
        pid = self.compiler.server_pid
        assert pid is not None
        return pid

    def outcome(self, source: GrammarSource, domain: str = "domain") -> object:
        assert self.ask(source, domain) is None
        while (found := self.kept(source, domain)) is None:
            self.absorb()
        return found

    def kept(self, source: GrammarSource, domain: str = "domain") -> object:
        return self.compiler.get(self.compiler.key(source, domain))


@pytest.fixture(scope="module")
def driver() -> Iterator[CompilerDriver]:
    """One compiler for all tests, because its server takes seconds to import the grammar engines."""
    driver = CompilerDriver()
    yield driver
    driver.compiler.close()


def schema(value: Any) -> GrammarSource:
    return GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(value))


def number(limit: int) -> GrammarSource:
    return schema({"type": "integer", "maximum": limit})


def test_a_grammar_is_compiled_once_for_each_domain(driver: CompilerDriver) -> None:
    """A grammar that a domain requests again is compiled once; the same grammar of another domain is compiled apart."""
    before = driver.compiler.num_compiles
    source = number(1)

    driver.ask(source)
    first = driver.outcome(source)
    other = driver.outcome(source, "other")

    assert driver.outcome(source) is first
    assert driver.outcome(source, "other") is other is not first
    assert driver.compiler.num_compiles == before + 2


def test_a_forgotten_domain_has_no_grammars(driver: CompilerDriver) -> None:
    """After a domain is forgotten its grammars are not in the cache, and those of another domain are."""
    source = number(77)
    for domain in ("gone", "stays"):
        driver.outcome(source, domain)

    driver.compiler.forget_domain("gone")

    assert driver.kept(source, "gone") is None
    assert driver.kept(source, "stays") is not None
    driver.compiler.check_integrity()


def test_public_grammars_are_compiled_once_for_all(tmp_path: Path) -> None:
    """All domains share the grammar of any JSON object, and of a schema in the operator's folder, however spaced."""
    (tmp_path / "order.json").write_text('{ "type": "integer",\n "maximum": 7 }')
    driver = CompilerDriver(public=PublicGrammars.read(tmp_path))
    try:
        for source in (GrammarSource(GrammarKind.JSON_OBJECT, ""), number(7)):
            assert driver.outcome(source, "one") is driver.outcome(source, "two")
        assert driver.kept(number(8), "two") is None
        assert driver.compiler.num_compiles == 2
    finally:
        driver.compiler.close()


def test_a_refusal_crosses_from_the_child_with_its_place(driver: CompilerDriver) -> None:
    """A refusal by the lint in the child process arrives with its pointer."""
    refusal = driver.outcome(schema({"not": {"multipleOf": 3}}))

    assert isinstance(refusal, InvalidRequest)
    assert refusal.param == "#/not/multipleOf"


def test_patterns_that_no_engine_compiles_are_refused_at_their_place(driver: CompilerDriver) -> None:
    """The error names the JSON pointer of the patterns, and quotes no expression that the caller has not written."""
    patterns = [{"pattern": f"(.*{letter}){{20}}"} for letter in "abc"]
    hard = {"type": "string", "allOf": [*patterns, {"pattern": "(.*c){20}.*d.{30}"}]}

    refusal = driver.outcome(schema({"type": "object", "properties": {"easy": {"pattern": "^a$"}, "h/p": hard}}))

    assert isinstance(refusal, InvalidRequest)
    assert refusal.param == "#/properties/h~1p"
    assert "#/properties/h~1p" in refusal.message
    assert not any(quoted in refusal.message for quoted in ("Regex", "\\x{", "(?:"))


def test_an_error_in_ebnf_is_the_engines_own(driver: CompilerDriver) -> None:
    """The error of a grammar in EBNF quotes the grammar engine, because the text is the caller's own."""
    refusal = driver.outcome(GrammarSource(GrammarKind.EBNF, 'root ::= "a" missing'))

    assert isinstance(refusal, InvalidRequest)
    assert "missing" in refusal.message


def test_a_compile_that_passes_its_deadline_is_killed(driver: CompilerDriver) -> None:
    """A compile over its deadline is killed and its refusal kept; the next grammar is compiled as usual."""
    hostile = GrammarSource(GrammarKind.EBNF, EXPLODING)

    refusal = driver.outcome(hostile)
    compiles = driver.compiler.num_compiles
    served = driver.outcome(number(2))

    assert isinstance(refusal, InvalidRequest)
    assert refusal.code == "grammar_too_costly"
    assert not isinstance(served, GraftworkError)
    assert driver.outcome(hostile) is refusal
    assert driver.compiler.num_compiles == compiles + 1


def test_another_party_does_not_wait_behind_a_flood(driver: CompilerDriver) -> None:
    """The grammars of one domain are compiled one at a time, so that another domain's grammar need not wait."""
    flood = [GrammarSource(GrammarKind.EBNF, EXPLODING + f'\ns{n} ::= "x"') for n in range(3)]
    for source in flood:
        driver.ask(source, "flooder")

    driver.ask(number(3), "other")
    first = driver.absorb()

    assert first.key == driver.compiler.key(number(3), "other")
    for _ in flood:
        driver.absorb()


def test_a_compile_that_needs_too_much_memory_ends_alone() -> None:
    """A compile over the memory limit ends its child process and not the compile server."""
    driver = CompilerDriver(replace(LIMITS, memory_bytes=2 * 2**20))
    try:
        refusal = driver.outcome(GrammarSource(GrammarKind.EBNF, 'root ::= ("a"{1,1000}){1,1000}'))
    finally:
        driver.compiler.close()

    assert isinstance(refusal, InvalidRequest)
    assert refusal.code == "grammar_too_costly"


def test_a_compile_server_that_dies_is_answered_for_and_replaced() -> None:
    """When the compile server dies, waiting requests get an error and the next request starts another server."""
    driver = CompilerDriver()
    try:
        driver.ask(number(4))
        os.killpg(driver.server_pid, signal.SIGKILL)
        lost = driver.absorb().outcome
        driver.compiler.forget_failures()
        driver.compiler.forget_failures()
        served = driver.outcome(number(4))
    finally:
        driver.compiler.close()

    assert isinstance(lost, InternalFailure)
    assert not isinstance(served, GraftworkError)


def test_a_compile_server_that_dies_takes_its_children_along() -> None:
    """When the compile server dies, its compiles fail at once and its child processes end."""
    driver = CompilerDriver(replace(LIMITS, seconds=30.0))
    try:
        driver.outcome(GrammarSource(GrammarKind.EBNF, 'root ::= "a"'))
        driver.ask(GrammarSource(GrammarKind.EBNF, EXPLODING))
        children = Path(f"/proc/{driver.server_pid}/task/{driver.server_pid}/children")
        while not (child := children.read_text().strip()):
            driver.compiler.check_integrity()
        os.kill(int(child), signal.SIGSTOP)  # it ends only if it is ended
        os.kill(driver.server_pid, signal.SIGKILL)
        lost = driver.inbox.get(timeout=WITHIN_S).outcome
        while is_at_work(child):
            driver.compiler.check_integrity()
    finally:
        driver.compiler.close()

    assert isinstance(lost, InternalFailure)


def is_at_work(pid: str) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_compile_that_never_got_a_processor_may_be_tried_again() -> None:
    """A compile that got no processor time fails with a retryable error, which is not cached."""
    driver = CompilerDriver(replace(LIMITS, wall_seconds=4.0))
    hard = GrammarSource(GrammarKind.EBNF, EXPLODING)
    try:
        driver.outcome(
            GrammarSource(GrammarKind.EBNF, 'root ::= "a"')
        )  # the compile server has started and imported its engine
        driver.ask(hard)
        children = Path(f"/proc/{driver.server_pid}/task/{driver.server_pid}/children")
        while not (child := children.read_text().strip()):
            driver.compiler.check_integrity()
        os.kill(int(child), signal.SIGSTOP)
        late = driver.absorb().outcome
        driver.compiler.forget_failures()
        driver.compiler.forget_failures()
        kept = driver.kept(hard)
    finally:
        driver.compiler.close()

    assert isinstance(late, CapacityContended)
    assert (late.code, kept) == ("grammar_not_reached", None)


def test_a_job_that_the_compile_server_does_not_read_holds_nobody_up() -> None:
    """A grammar that is longer than a pipe's buffer does not block the caller."""
    driver = CompilerDriver()
    long = GrammarSource(GrammarKind.EBNF, "#" * (1 << 20))
    try:
        driver.outcome(number(5))
        os.kill(driver.server_pid, signal.SIGSTOP)
        asking = threading.Thread(target=driver.ask, args=(long,), daemon=True)
        asking.start()
        asking.join(timeout=WITHIN_S)
        is_held_up = asking.is_alive()
        os.kill(driver.server_pid, signal.SIGCONT)
        refusal = driver.outcome(long)
    finally:
        driver.compiler.close()

    assert not is_held_up
    assert isinstance(refusal, InvalidRequest)


def test_a_failure_that_has_made_way_is_forgotten_only_once() -> None:
    """In a full cache, a failure that was evicted before its retry is removed only once."""
    driver = CompilerDriver(replace(LIMITS, cache_entries=1))
    compiler = driver.compiler
    try:
        driver.ask(number(8))
        os.killpg(driver.server_pid, signal.SIGKILL)
        lost = driver.absorb().outcome
        compiler.forget_failures()
        served = driver.outcome(number(9))
        compiler.forget_failures()
        compiler.check_integrity()
    finally:
        compiler.close()

    assert isinstance(lost, InternalFailure)
    assert driver.kept(number(8)) is None
    assert driver.kept(number(9)) is served


def test_the_cache_is_bounded() -> None:
    """A full cache evicts the least recently used grammar."""
    driver = CompilerDriver(replace(LIMITS, cache_entries=2))
    try:
        for limit in (1, 2, 3):
            driver.outcome(number(limit))
        kept = [driver.kept(number(limit)) is not None for limit in (1, 2, 3)]
    finally:
        driver.compiler.close()

    assert kept == [False, True, True]


def test_a_party_that_has_spent_its_time_waits_and_others_do_not() -> None:
    """A domain that used up its compile time is told exactly how long to wait, and others do not wait."""
    clock = ManualClock()
    budget = CompileBudget(15, clock)

    budget.charge("spender", 20)
    wait_s = budget.seconds_until_credit("spender")
    clock.advance(wait_s - 0.01)
    just_before = budget.seconds_until_credit("spender")
    clock.advance(0.02)

    assert wait_s == pytest.approx(20)
    assert just_before > 0
    assert budget.seconds_until_credit("spender") == 0
    assert budget.seconds_until_credit("other") == 0


def test_strict_or_not_are_two_grammars(driver: CompilerDriver) -> None:
    """One schema with and without strict is compiled as two grammars."""
    text = json.dumps({"type": "array", "uniqueItems": True})

    strict = driver.outcome(GrammarSource(GrammarKind.JSON_SCHEMA, text, strict=True))
    loose = driver.outcome(GrammarSource(GrammarKind.JSON_SCHEMA, text, strict=False))

    assert isinstance(strict, InvalidRequest)
    assert not isinstance(loose, GraftworkError)


def test_a_compile_is_charged_to_the_party_that_asked() -> None:
    """The compile time is charged to the domain that asked, and another domain's grammar is compiled."""
    driver = CompilerDriver(replace(LIMITS, domain_seconds_per_minute=1e-9))
    try:
        driver.outcome(number(6), "spender")
        again, others = driver.ask(number(7), "spender"), driver.ask(number(7), "other")
    finally:
        driver.compiler.close()

    assert isinstance(again, CapacityContended)
    assert (again.code, others) == ("grammar_budget_spent", None)
    assert again.retry_after_s is not None
    assert again.retry_after_s > 0


def test_a_party_may_queue_only_so_many() -> None:
    """A domain that has one compile and a full queue is refused, and another domain is not."""
    driver = CompilerDriver(replace(LIMITS, domain_queue=2))
    try:
        told = [driver.ask(number(limit), "flooder") for limit in range(4)]
        others = driver.ask(number(4), "other")
    finally:
        driver.compiler.close()

    assert told[:3] == [None, None, None]
    assert isinstance(told[3], CapacityContended)
    assert (told[3].code, others) == ("grammar_queue_full", None)
