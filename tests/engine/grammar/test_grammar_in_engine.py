"""Tests of grammars in a whole engine, beside requests without a grammar."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.events import FinishReason
from graftwork.engine.core.requests import EngineRequest, GrammarKind, GrammarSource, ReasoningRule, ServiceTier
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.rpc.codec import request_from_wire, request_to_wire
from graftwork.platform.clock import Clock, ManualClock
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.random_models import FolderSource

MODEL = Path(__file__).parents[3] / "demo" / "model"
PROMPT = list(range(20, 40))
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 3, "maximum": 70},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOSED = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}}, "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
TAG = {
    "calls": [{"begin": '<tool_call>{"name": "f", "arguments": ', "schema": CITY, "end": "}</tool_call>"}],
    "required": True,
    "parallel": False,
}


class DemoEngine(EngineDriver):
    """An engine over the demo model, with its tokenizer."""

    def __init__(self, clock: Clock | None = None, **options: Any) -> None:
        config = EngineConfig(model=MODEL, device_bytes=32 * 2**20, dtype="float32", **options)
        super().__init__(build_engine(config, lambda _: FolderSource({}, {}), clock))
        self._tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))

    def text(self, outcome: Outcome) -> str:
        assert outcome.error is None, outcome.error
        return str(self._tokenizer.decode(outcome.token_ids))


@pytest.fixture(scope="module")
def demo_engine() -> Iterator[DemoEngine]:
    demo_engine = DemoEngine()
    yield demo_engine
    demo_engine.loop.check_integrity()
    demo_engine.close()


def grammar(kind: GrammarKind, text: Any) -> GrammarSource:
    return GrammarSource(kind, text if isinstance(text, str) else json.dumps(text))


@pytest.mark.parametrize("schema", [CITY, CLOSED], ids=["llguidance", "xgrammar"])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_every_answer_fits_its_schema(demo_engine: DemoEngine, schema: dict[str, Any], temperature: float) -> None:
    """Answers at any temperature parse, fit their schema and end by themselves."""
    outcomes = [
        demo_engine.submit(PROMPT, grammar=grammar(GrammarKind.JSON_SCHEMA, schema), max_tokens=150, temperature=temperature, seed=seed)
        for seed in range(6)
    ]  # fmt: skip
    demo_engine.finish()

    for outcome in outcomes:
        assert outcome.finish is FinishReason.STOP
        jsonschema.validate(json.loads(demo_engine.text(outcome)), schema)


def test_a_required_call_is_a_call(demo_engine: DemoEngine) -> None:
    """A tag that requires one call is answered by one call with valid arguments."""
    outcome = demo_engine.run(
        PROMPT, grammar=grammar(GrammarKind.STRUCTURAL_TAG, TAG), max_tokens=150, temperature=1.0, seed=5
    )

    text = demo_engine.text(outcome).removeprefix("<tool_call>").removesuffix("</tool_call>")

    assert outcome.finish is FinishReason.STOP
    jsonschema.validate(json.loads(text)["arguments"], CITY)


def test_free_neighbours_are_not_touched(demo_engine: DemoEngine) -> None:
    """A request without a grammar gets the same tokens beside constrained ones as alone."""
    alone = demo_engine.run(PROMPT, max_tokens=30, temperature=1.0, seed=9)

    beside = demo_engine.submit(PROMPT, max_tokens=30, temperature=1.0, seed=9)
    for seed in range(3):
        demo_engine.submit(
            PROMPT, grammar=grammar(GrammarKind.JSON_SCHEMA, CITY), max_tokens=30, temperature=1.0, seed=seed
        )
    demo_engine.finish()

    assert beside.token_ids == alone.token_ids


def test_a_dead_end_ends_that_request_alone(demo_engine: DemoEngine) -> None:
    """A dead end ends its request with a typed error, and other requests continue."""
    dead = demo_engine.submit(PROMPT, grammar=grammar(GrammarKind.EBNF, 'root ::= root "a"'))
    fine = demo_engine.submit(PROMPT, grammar=grammar(GrammarKind.REGEX, "[a-c]{3}"), max_tokens=8)
    demo_engine.finish()

    assert isinstance(dead.error, InvalidRequest)
    assert dead.error.code == "grammar_dead_end"
    assert fine.finish is FinishReason.STOP


def test_a_grammar_that_is_not_served_is_refused_with_its_place(demo_engine: DemoEngine) -> None:
    """A grammar that the engine refuses has the lint's error with its pointer."""
    outcome = demo_engine.run(
        PROMPT, grammar=grammar(GrammarKind.JSON_SCHEMA, {"properties": {"a": {"uniqueItems": True}}})
    )

    assert isinstance(outcome.error, InvalidRequest)
    assert outcome.error.param == "#/properties/a/uniqueItems"


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 6}], ids=["ignored", "banned"])
def test_a_complete_answer_ends_though_no_stop_token_may_come(demo_engine: DemoEngine, options: dict[str, Any]) -> None:
    """A complete answer after which no token is possible ends with `stop`."""
    outcome = demo_engine.run(PROMPT, grammar=grammar(GrammarKind.REGEX, "abc"), **options)

    assert outcome.finish is FinishReason.STOP
    assert demo_engine.text(outcome) == "abc"


def test_others_are_served_while_a_grammar_is_compiled(demo_engine: DemoEngine) -> None:
    """Requests behind one whose grammar is still compiled are served."""
    hard = demo_engine.submit(PROMPT, grammar=grammar(GrammarKind.EBNF, 'root ::= ("a"{1,900}){1,900}'), max_tokens=2)
    free = demo_engine.submit(PROMPT, max_tokens=4, ignore_eos=True)
    while not free.is_over:
        assert demo_engine.loop.step()

    assert not hard.is_over
    demo_engine.finish()
    assert hard.finish is not None


def test_a_cancelled_request_leaves_its_grammar(demo_engine: DemoEngine) -> None:
    """After a cancel, in the queue or while running, the manager keeps nothing of the request."""
    source = grammar(GrammarKind.JSON_SCHEMA, {"type": "array", "items": {"type": "integer"}})
    demo_engine.run(PROMPT, grammar=source, max_tokens=2)

    running = demo_engine.submit(PROMPT, grammar=source, max_tokens=50)
    demo_engine.step()
    demo_engine.cancel(running)

    demo_engine.loop.check_integrity()


def test_a_request_that_starts_again_stands_where_its_tokens_brought_it(demo_engine: DemoEngine) -> None:
    """A cursor opened in the middle of an answer has the same mask as one that ran so far."""
    source = grammar(GrammarKind.REGEX, "[a-c]{3}[0-9]{3}")
    answer = demo_engine.run(PROMPT, grammar=source, max_tokens=20).token_ids[:-1]
    domain = IsolationDomain(b"tenant")
    request = EngineRequest(RequestId("again"), tuple(PROMPT), SamplingParams(9), domain, grammar=source)
    manager = demo_engine.engine.grammars

    manager.want([request])
    manager.open(request, [1017], answer[:2])
    resumed = manager.cursor(request.request_id)
    assert resumed is not None
    rest = resumed.num_allowed(answer)
    followed = resumed.num_allowed(answer[2:])
    manager.close(request.request_id)

    assert rest < len(answer)
    assert followed == len(answer) - 2


def test_a_model_without_a_tokenizer_refuses_grammars(models: RandomModels) -> None:
    """A model without a tokenizer refuses grammars with a clear error, and serves other requests."""
    driver = models.engine()

    refused = driver.run([5, 6, 7], grammar=grammar(GrammarKind.REGEX, "a"))

    assert isinstance(refused.error, InvalidRequest)
    assert driver.run([5, 6, 7]).finish is not None


@pytest.mark.parametrize("source", [None, GrammarSource(GrammarKind.REGEX, "a+", strict=False)])
def test_a_grammar_crosses_the_wire(source: GrammarSource | None) -> None:
    """A grammar, or its absence, arrives over gRPC unchanged."""
    request = EngineRequest(RequestId("r"), (1,), SamplingParams(max_tokens=1), IsolationDomain(b"d"), grammar=source)

    assert request_from_wire(request_to_wire(request)) == request


@pytest.mark.parametrize(
    "drafter", [{}, {"draft_model": MODEL}, {"draft_head": MODEL.parent / "head"}], ids=["lookup", "model", "head"]
)
def test_drafts_change_no_constrained_answer(drafter: dict[str, Path]) -> None:
    """Constrained and free answers, greedy or sampled, have the same tokens with drafts and without, and some drafts
    come from the grammar."""
    plain, guesser = DemoEngine(max_draft_tokens=0), DemoEngine(ManualClock(), **drafter)
    speculator = guesser.engine.scheduler.speculator
    for num_rows in range(1, 400):  # it believes rows and guesses to cost nothing, and verifies all that it can
        speculator.cost.record(num_rows, 1.0)
        if speculator.model_drafter is not None:
            speculator.model_drafter.pass_cost.record(num_rows, 0.001)
    sources = [None, *(grammar(GrammarKind.JSON_SCHEMA, one) for one in (CITY, CLOSED)), grammar(GrammarKind.STRUCTURAL_TAG, TAG)]  # fmt: skip
    jobs: list[dict[str, Any]] = [
        {"prompt": [20 + number, *PROMPT], "grammar": source, "temperature": temperature, "seed": 5, "max_tokens": 60}
        for number, source in enumerate(sources)
        for temperature in (0.0, 0.8)
    ]

    guessing = [guesser.submit(**job) for _ in range(3) for job in jobs]
    guesser.finish()
    alone = [plain.submit(**job) for job in jobs]
    plain.finish()
    for demo_engine in (plain, guesser):
        demo_engine.close()

    assert [outcome.token_ids for outcome in guessing] == 3 * [outcome.token_ids for outcome in alone]
    assert sum(outcome.drafts.forced_tokens for outcome in guessing) > 20
    assert (speculator.counts.model_accepted > (200 if "draft_model" in drafter else 0)) == bool(drafter)
    assert all(outcome.drafts.drafted_tokens == 0 for outcome in alone)


def test_drafts_keep_to_the_grammar_of_an_answer_that_was_offloaded(
    demo_engine: DemoEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A constrained answer that is offloaded several times, and its drafts, continue as without the offload."""
    guesser = DemoEngine(ManualClock(), max_running=4)
    for num_rows in range(1, 400):
        guesser.engine.scheduler.speculator.cost.record(num_rows, 1.0)
    sources = [grammar(GrammarKind.JSON_SCHEMA, one) for one in (CITY, CLOSED)] + [grammar(GrammarKind.STRUCTURAL_TAG, TAG)]  # fmt: skip
    jobs: list[dict[str, Any]] = [
        {"prompt": PROMPT, "grammar": source, "temperature": 1.0, "seed": seed, "max_tokens": 60}
        for source in sources
        for seed in range(4)
    ]

    guessing = [guesser.submit(**job) for job in jobs]
    while not all(outcome.is_over for outcome in guessing):
        guesser.step()  # the free places are taken
        guesser.submit([7], tier=ServiceTier.PRIORITY, max_tokens=1)
        guesser.step()
    preemptions = guesser.loop.stats().preemptions
    guesser.close()
    alone = [demo_engine.submit(**job) for job in jobs]
    demo_engine.finish()

    assert [outcome.error for outcome in guessing] == [None] * len(jobs)
    assert [outcome.token_ids for outcome in guessing] == [outcome.token_ids for outcome in alone]
    assert preemptions > len(jobs)
    assert "grammar_mask_failed" not in caplog.text


@pytest.mark.parametrize("max_draft_tokens", [0, 8])
@pytest.mark.parametrize("budget", [0, 7])
def test_reasoning_ends_after_its_budget_and_the_answer_fits(budget: int, max_draft_tokens: int) -> None:
    """An answer reasons for at most its budget, at any temperature, and what follows fits the schema. A request without
    a grammar beside it keeps its budget too, and neither ends inside its reasoning."""
    engine = DemoEngine(max_draft_tokens=max_draft_tokens)
    close, gap = 300, 11
    rule = ReasoningRule(open_token_id=301, close_token_id=close, is_open=True, max_tokens=budget, gap_token_ids=(gap,))
    asked = [None if seed % 2 else grammar(GrammarKind.JSON_SCHEMA, CITY) for seed in range(6)]

    outcomes = [
        engine.submit(PROMPT, grammar=one, reasoning=rule, max_tokens=150, temperature=1.0, seed=seed)
        for seed, one in enumerate(asked)
    ]
    engine.finish()

    for one, outcome in zip(asked, outcomes, strict=True):
        place = outcome.token_ids.index(close)
        assert place <= budget
        if one is not None:
            outcome.token_ids = outcome.token_ids[place + 1 :]
            jsonschema.validate(json.loads(engine.text(outcome).strip()), CITY)
    assert any(
        outcome.token_ids.index(close) == budget for one, outcome in zip(asked, outcomes, strict=True) if one is None
    )
    engine.loop.check_integrity()
    engine.close()


def test_a_rule_of_reasoning_survives_the_wire() -> None:
    """All fields reach the engine."""
    rule = ReasoningRule(5, 6, is_open=True, max_tokens=0, gap_token_ids=(7, 8))
    request = EngineRequest(RequestId("r"), (1,), SamplingParams(max_tokens=1), IsolationDomain(b"d"), reasoning=rule)

    assert request_from_wire(request_to_wire(request)) == request
