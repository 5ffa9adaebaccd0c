"""The compiler and its nursery: single flight, limits that are kept by killing, budgets, and a bounded cache."""

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
from graftwork.engine.grammar.compile.grammar_cache import GrammarCache, GrammarKey, PublicGrammars
from graftwork.engine.grammar.matching.vocabulary import read_vocabulary
from graftwork.engine.grammar.schema.limits import CompileLimits
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import CapacityContended, GraftworkError, InternalFailure, InvalidRequest

MODEL = Path(__file__).parents[4] / "demo" / "model"
WITHIN_S = 60
LIMITS = CompileLimits(seconds=1.0, wall_seconds=40.0, niceness=0)  # what is asserted must not wait for idle cores
EXPLODING = "\n".join([*(f'r{n} ::= r{n + 1} r{n + 1} | "a"' for n in range(2000)), 'r2000 ::= "b"', "root ::= r0"])


class Workshop:
    """A compiler, and the loop's part in its life."""

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
def workshop() -> Iterator[Workshop]:
    """One nursery for all: importing the engines takes seconds."""
    workshop = Workshop()
    yield workshop
    workshop.compiler.close()


def schema(value: Any) -> GrammarSource:
    return GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(value))


def number(limit: int) -> GrammarSource:
    return schema({"type": "integer", "maximum": limit})


def test_a_grammar_is_compiled_once_for_each_domain(workshop: Workshop) -> None:
    """Asked for again while it is compiled, and after, it is the same one; another domain gets one of its own."""
    before = workshop.compiler.num_compiles
    source = number(1)

    workshop.ask(source)
    first = workshop.outcome(source)
    other = workshop.outcome(source, "other")

    assert workshop.outcome(source) is first
    assert workshop.outcome(source, "other") is other is not first
    assert workshop.compiler.num_compiles == before + 2


def test_public_grammars_are_compiled_once_for_all(tmp_path: Path) -> None:
    """Any JSON object is public, and a schema in the operator's folder, however it is spaced and whether strict."""
    (tmp_path / "order.json").write_text('{ "type": "integer",\n "maximum": 7 }')
    workshop = Workshop(public=PublicGrammars.read(tmp_path))
    try:
        for source in (GrammarSource(GrammarKind.JSON_OBJECT, ""), number(7)):
            assert workshop.outcome(source, "one") is workshop.outcome(source, "two")
        assert workshop.kept(number(8), "two") is None
        assert workshop.compiler.num_compiles == 2
    finally:
        workshop.compiler.close()


def test_a_folder_of_public_grammars_is_read_or_refused_by_name(tmp_path: Path) -> None:
    """A file that is no JSON, and a folder that is none, are named."""
    (tmp_path / "bad.json").write_text("{")

    for folder, named in ((tmp_path, "bad.json"), (tmp_path / "none", "none")):
        with pytest.raises(InvalidRequest, match=named):
            PublicGrammars.read(folder)


def keep_refusals(cache: GrammarCache, domain: str | None, names: range) -> list[GrammarKey]:
    keys = [GrammarKey(domain, str(name)) for name in names]
    for key in keys:
        cache.keep(key, InvalidRequest("no"))
        cache.check_integrity()
    return keys


def test_a_domain_evicts_its_own_grammars_first() -> None:
    """Above its own bound a domain loses its oldest results, and above the bound of all it is the fullest that does."""
    cache = GrammarCache(replace(LIMITS, cache_entries=10, domain_cache_entries=6))
    public = keep_refusals(cache, None, range(6))
    light = keep_refusals(cache, "light", range(3))
    calm = keep_refusals(cache, "calm", range(2))

    flood = keep_refusals(cache, "flood", range(20))

    kept = set(cache)
    assert kept.issuperset([*public, *light, *calm])
    assert kept.intersection(flood) == set(flood[-5:])


def test_a_refusal_crosses_from_the_child_with_its_place(workshop: Workshop) -> None:
    """The lint runs where it can be killed; its errors are the same ones."""
    refusal = workshop.outcome(schema({"not": {"multipleOf": 3}}))

    assert isinstance(refusal, InvalidRequest)
    assert refusal.param == "#/not/multipleOf"


def test_patterns_that_no_engine_compiles_are_refused_at_their_place(workshop: Workshop) -> None:
    """The error names the JSON pointer of the patterns, and quotes no expression that the caller has not written."""
    patterns = [{"pattern": f"(.*{letter}){{20}}"} for letter in "abc"]
    hard = {"type": "string", "allOf": [*patterns, {"pattern": "(.*c){20}.*d.{30}"}]}

    refusal = workshop.outcome(schema({"type": "object", "properties": {"easy": {"pattern": "^a$"}, "h/p": hard}}))

    assert isinstance(refusal, InvalidRequest)
    assert refusal.param == "#/properties/h~1p"
    assert "#/properties/h~1p" in refusal.message
    assert not any(quoted in refusal.message for quoted in ("Regex", "\\x{", "(?:"))


def test_an_error_in_ebnf_is_the_engines_own(workshop: Workshop) -> None:
    """The text is the caller's, so the message that quotes it helps."""
    refusal = workshop.outcome(GrammarSource(GrammarKind.EBNF, 'root ::= "a" missing'))

    assert isinstance(refusal, InvalidRequest)
    assert "missing" in refusal.message


def test_a_compile_that_passes_its_deadline_is_killed(workshop: Workshop) -> None:
    """The next grammar is compiled as if nothing had been; the refusal is kept, and costs nothing again."""
    hostile = GrammarSource(GrammarKind.EBNF, EXPLODING)

    refusal = workshop.outcome(hostile)
    compiles = workshop.compiler.num_compiles
    served = workshop.outcome(number(2))

    assert isinstance(refusal, InvalidRequest)
    assert refusal.code == "grammar_too_costly"
    assert not isinstance(served, GraftworkError)
    assert workshop.outcome(hostile) is refusal
    assert workshop.compiler.num_compiles == compiles + 1


def test_another_party_does_not_wait_behind_a_flood(workshop: Workshop) -> None:
    """Grammars of one domain are compiled one at a time, so that there is room for the next domain's."""
    flood = [GrammarSource(GrammarKind.EBNF, EXPLODING + f'\ns{n} ::= "x"') for n in range(3)]
    for source in flood:
        workshop.ask(source, "flooder")

    workshop.ask(number(3), "other")
    first = workshop.absorb()

    assert first.key == workshop.compiler.key(number(3), "other")
    for _ in flood:
        workshop.absorb()


def test_a_compile_that_needs_too_much_memory_ends_alone() -> None:
    """The limit holds in the child; the nursery lives on."""
    workshop = Workshop(replace(LIMITS, memory_bytes=2 * 2**20))
    try:
        refusal = workshop.outcome(GrammarSource(GrammarKind.EBNF, 'root ::= ("a"{1,1000}){1,1000}'))
    finally:
        workshop.compiler.close()

    assert isinstance(refusal, InvalidRequest)
    assert refusal.code == "grammar_too_costly"


def test_a_nursery_that_dies_is_answered_for_and_replaced() -> None:
    """Those who wait are told; the next who asks gets another nursery."""
    workshop = Workshop()
    try:
        workshop.ask(number(4))
        os.killpg(workshop.server_pid, signal.SIGKILL)
        lost = workshop.absorb().outcome
        workshop.compiler.forget_failures()
        workshop.compiler.forget_failures()
        served = workshop.outcome(number(4))
    finally:
        workshop.compiler.close()

    assert isinstance(lost, InternalFailure)
    assert not isinstance(served, GraftworkError)


def test_a_nursery_that_dies_takes_its_children_along() -> None:
    """What it compiled is answered for at once, and nothing goes on compiling for nobody."""
    workshop = Workshop(replace(LIMITS, seconds=30.0))
    try:
        workshop.outcome(GrammarSource(GrammarKind.EBNF, 'root ::= "a"'))
        workshop.ask(GrammarSource(GrammarKind.EBNF, EXPLODING))
        children = Path(f"/proc/{workshop.server_pid}/task/{workshop.server_pid}/children")
        while not (child := children.read_text().strip()):
            workshop.compiler.check_integrity()
        os.kill(int(child), signal.SIGSTOP)  # it ends only if it is ended
        os.kill(workshop.server_pid, signal.SIGKILL)
        lost = workshop.inbox.get(timeout=WITHIN_S).outcome
        while is_at_work(child):
            workshop.compiler.check_integrity()
    finally:
        workshop.compiler.close()

    assert isinstance(lost, InternalFailure)


def is_at_work(pid: str) -> bool:
    """Whether a process is there, and no corpse that its parent has not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_compile_that_never_got_a_processor_may_be_tried_again() -> None:
    """A machine that is busy says nothing of the grammar: the refusal is of the moment, and is not kept."""
    workshop = Workshop(replace(LIMITS, wall_seconds=4.0))
    hard = GrammarSource(GrammarKind.EBNF, EXPLODING)
    try:
        workshop.outcome(GrammarSource(GrammarKind.EBNF, 'root ::= "a"'))  # the nursery has come up, and has its engine
        workshop.ask(hard)
        children = Path(f"/proc/{workshop.server_pid}/task/{workshop.server_pid}/children")
        while not (child := children.read_text().strip()):
            workshop.compiler.check_integrity()
        os.kill(int(child), signal.SIGSTOP)
        late = workshop.absorb().outcome
        workshop.compiler.forget_failures()
        workshop.compiler.forget_failures()
        kept = workshop.kept(hard)
    finally:
        workshop.compiler.close()

    assert isinstance(late, CapacityContended)
    assert (late.code, kept) == ("grammar_not_reached", None)


def test_a_job_that_the_nursery_does_not_read_holds_nobody_up() -> None:
    """A grammar that is longer than a pipe holds is handed in behind the loop's back."""
    workshop = Workshop()
    long = GrammarSource(GrammarKind.EBNF, "#" * (1 << 20))
    try:
        workshop.outcome(number(5))
        os.kill(workshop.server_pid, signal.SIGSTOP)
        asking = threading.Thread(target=workshop.ask, args=(long,), daemon=True)
        asking.start()
        asking.join(timeout=WITHIN_S)
        is_held_up = asking.is_alive()
        os.kill(workshop.server_pid, signal.SIGCONT)
        refusal = workshop.outcome(long)
    finally:
        workshop.compiler.close()

    assert not is_held_up
    assert isinstance(refusal, InvalidRequest)


def test_a_failure_that_has_made_way_is_forgotten_only_once() -> None:
    """In a full cache a failure of our own may be dropped before it is tried again."""
    workshop = Workshop(replace(LIMITS, cache_entries=1))
    compiler = workshop.compiler
    try:
        workshop.ask(number(8))
        os.killpg(workshop.server_pid, signal.SIGKILL)
        lost = workshop.absorb().outcome
        compiler.forget_failures()
        served = workshop.outcome(number(9))
        compiler.forget_failures()
        compiler.check_integrity()
    finally:
        compiler.close()

    assert isinstance(lost, InternalFailure)
    assert workshop.kept(number(8)) is None
    assert workshop.kept(number(9)) is served


def test_the_cache_is_bounded() -> None:
    """The least recently used grammar makes way."""
    workshop = Workshop(replace(LIMITS, cache_entries=2))
    try:
        for limit in (1, 2, 3):
            workshop.outcome(number(limit))
        kept = [workshop.kept(number(limit)) is not None for limit in (1, 2, 3)]
    finally:
        workshop.compiler.close()

    assert kept == [False, True, True]


def test_a_party_that_has_spent_its_time_waits_and_others_do_not() -> None:
    """The wait that it is told is exactly how long it takes until it may compile again."""
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


def test_strict_or_not_are_two_grammars(workshop: Workshop) -> None:
    """What one of them refuses, the other lets go."""
    text = json.dumps({"type": "array", "uniqueItems": True})

    strict = workshop.outcome(GrammarSource(GrammarKind.JSON_SCHEMA, text, strict=True))
    loose = workshop.outcome(GrammarSource(GrammarKind.JSON_SCHEMA, text, strict=False))

    assert isinstance(strict, InvalidRequest)
    assert not isinstance(loose, GraftworkError)


def test_a_compile_is_charged_to_the_party_that_asked() -> None:
    """With hardly any time a minute, its second grammar is refused with a wait; another domain's first is not."""
    workshop = Workshop(replace(LIMITS, domain_seconds_per_minute=1e-9))
    try:
        workshop.outcome(number(6), "spender")
        again, others = workshop.ask(number(7), "spender"), workshop.ask(number(7), "other")
    finally:
        workshop.compiler.close()

    assert isinstance(again, CapacityContended)
    assert (again.code, others) == ("grammar_budget_spent", None)
    assert again.retry_after_s is not None
    assert again.retry_after_s > 0


def test_a_party_may_queue_only_so_many() -> None:
    """One is compiled, as many as the limit wait, and the next is refused; another domain's is not."""
    workshop = Workshop(replace(LIMITS, domain_queue=2))
    try:
        told = [workshop.ask(number(limit), "flooder") for limit in range(4)]
        others = workshop.ask(number(4), "other")
    finally:
        workshop.compiler.close()

    assert told[:3] == [None, None, None]
    assert isinstance(told[3], CapacityContended)
    assert (told[3].code, others) == ("grammar_queue_full", None)
