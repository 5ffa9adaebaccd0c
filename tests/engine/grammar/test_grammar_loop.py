"""Grammars in a whole engine: answers that always parse, among free neighbours, under every sampling."""

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
from graftwork.engine.core.requests import EngineRequest, GrammarKind, GrammarSource, ServiceTier
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.rpc.codec import request_from_wire, request_to_wire
from graftwork.platform.clock import Clock, ManualClock
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.conftest import Lab
from tests.engine.harness import Harness, Outcome
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


class Scene(Harness):
    """An engine over the demo model, and its words."""

    def __init__(self, clock: Clock | None = None, **options: Any) -> None:
        config = EngineConfig(model=MODEL, device_bytes=32 * 2**20, dtype="float32", **options)
        super().__init__(build_engine(config, lambda _: FolderSource({}, {}), clock))
        self._tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))

    def text(self, outcome: Outcome) -> str:
        assert outcome.error is None, outcome.error
        return str(self._tokenizer.decode(outcome.token_ids))


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.loop.check_integrity()
    scene.close()


def grammar(kind: GrammarKind, text: Any) -> GrammarSource:
    return GrammarSource(kind, text if isinstance(text, str) else json.dumps(text))


@pytest.mark.parametrize("schema", [CITY, CLOSED], ids=["llguidance", "xgrammar"])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_every_answer_fits_its_schema(scene: Scene, schema: dict[str, Any], temperature: float) -> None:
    """However wildly it is sampled, it parses, fits, and ends by itself."""
    outcomes = [
        scene.submit(PROMPT, grammar=grammar(GrammarKind.JSON_SCHEMA, schema), max_tokens=150, temperature=temperature, seed=seed)
        for seed in range(6)
    ]  # fmt: skip
    scene.finish()

    for outcome in outcomes:
        assert outcome.finish is FinishReason.STOP
        jsonschema.validate(json.loads(scene.text(outcome)), schema)


def test_a_required_call_is_a_call(scene: Scene) -> None:
    """A tag that allows one call and nothing else is answered by one call whose arguments fit."""
    outcome = scene.run(
        PROMPT, grammar=grammar(GrammarKind.STRUCTURAL_TAG, TAG), max_tokens=150, temperature=1.0, seed=5
    )

    text = scene.text(outcome).removeprefix("<tool_call>").removesuffix("</tool_call>")

    assert outcome.finish is FinishReason.STOP
    jsonschema.validate(json.loads(text)["arguments"], CITY)


def test_free_neighbours_are_not_touched(scene: Scene) -> None:
    """A request without a grammar gets the same tokens beside constrained ones as alone."""
    alone = scene.run(PROMPT, max_tokens=30, temperature=1.0, seed=9)

    beside = scene.submit(PROMPT, max_tokens=30, temperature=1.0, seed=9)
    for seed in range(3):
        scene.submit(PROMPT, grammar=grammar(GrammarKind.JSON_SCHEMA, CITY), max_tokens=30, temperature=1.0, seed=seed)
    scene.finish()

    assert beside.token_ids == alone.token_ids


def test_a_dead_end_ends_that_request_alone(scene: Scene) -> None:
    """A typed error for it; its neighbours go on."""
    dead = scene.submit(PROMPT, grammar=grammar(GrammarKind.EBNF, 'root ::= root "a"'))
    fine = scene.submit(PROMPT, grammar=grammar(GrammarKind.REGEX, "[a-c]{3}"), max_tokens=8)
    scene.finish()

    assert isinstance(dead.error, InvalidRequest)
    assert dead.error.code == "grammar_dead_end"
    assert fine.finish is FinishReason.STOP


def test_a_grammar_that_is_not_served_is_refused_with_its_place(scene: Scene) -> None:
    """Where the engine is the first to read it, the error is the one that the lint gives."""
    outcome = scene.run(PROMPT, grammar=grammar(GrammarKind.JSON_SCHEMA, {"properties": {"a": {"uniqueItems": True}}}))

    assert isinstance(outcome.error, InvalidRequest)
    assert outcome.error.param == "#/properties/a/uniqueItems"


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 6}], ids=["ignored", "banned"])
def test_a_complete_answer_ends_though_no_stop_token_may_come(scene: Scene, options: dict[str, Any]) -> None:
    """Nothing can follow and nothing may stop it: it has stopped."""
    outcome = scene.run(PROMPT, grammar=grammar(GrammarKind.REGEX, "abc"), **options)

    assert outcome.finish is FinishReason.STOP
    assert scene.text(outcome) == "abc"


def test_others_are_served_while_a_grammar_is_compiled(scene: Scene) -> None:
    """Requests behind one whose grammar is not ready are not held back by it."""
    hard = scene.submit(PROMPT, grammar=grammar(GrammarKind.EBNF, 'root ::= ("a"{1,900}){1,900}'), max_tokens=2)
    free = scene.submit(PROMPT, max_tokens=4, ignore_eos=True)
    while not free.is_over:
        assert scene.loop.step()

    assert not hard.is_over
    scene.finish()
    assert hard.finish is not None


def test_a_cancelled_request_leaves_its_grammar(scene: Scene) -> None:
    """In the queue and while it runs; the manager keeps nothing of it."""
    source = grammar(GrammarKind.JSON_SCHEMA, {"type": "array", "items": {"type": "integer"}})
    scene.run(PROMPT, grammar=source, max_tokens=2)

    running = scene.submit(PROMPT, grammar=source, max_tokens=50)
    scene.step()
    scene.cancel(running)

    scene.loop.check_integrity()


def test_a_request_that_starts_again_stands_where_its_tokens_brought_it(scene: Scene) -> None:
    """Opened behind half an answer, the mask is that of a request that has run so far."""
    source = grammar(GrammarKind.REGEX, "[a-c]{3}[0-9]{3}")
    answer = scene.run(PROMPT, grammar=source, max_tokens=20).token_ids[:-1]
    request = EngineRequest(
        RequestId("again"), tuple(PROMPT), SamplingParams(9), IsolationDomain(b"tenant"), grammar=source
    )
    manager = scene.engine.grammars

    manager.want([request])
    manager.open(request, [1017], answer[:2])
    resumed = manager.cursor(request.request_id)
    assert resumed is not None
    rest = resumed.num_allowed(answer)
    followed = resumed.num_allowed(answer[2:])
    manager.close(request.request_id)

    assert rest < len(answer)
    assert followed == len(answer) - 2


def test_a_model_without_a_tokenizer_refuses_grammars(lab: Lab) -> None:
    """It says what is missing, and serves everything else."""
    harness = lab.engine()

    refused = harness.run([5, 6, 7], grammar=grammar(GrammarKind.REGEX, "a"))

    assert isinstance(refused.error, InvalidRequest)
    assert harness.run([5, 6, 7]).finish is not None


@pytest.mark.parametrize("source", [None, GrammarSource(GrammarKind.REGEX, "a+", strict=False)])
def test_a_grammar_crosses_the_wire(source: GrammarSource | None) -> None:
    """As it was, and absent where there is none."""
    request = EngineRequest(RequestId("r"), (1,), SamplingParams(max_tokens=1), IsolationDomain(b"d"), grammar=source)

    assert request_from_wire(request_to_wire(request)) == request


def test_drafts_change_no_constrained_answer() -> None:
    """Greedy and sampled, under schemas, a tag and nothing, in one batch: the same tokens with guesses and without;
    some of them were spelled out by the grammar."""
    plain, guesser = Scene(max_draft_tokens=0), Scene(ManualClock())
    for num_rows in range(1, 400):  # it believes its rows to cost nothing, and verifies all that it can
        guesser.engine.scheduler.speculator.cost.record(num_rows, 1.0)
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
    for scene in (plain, guesser):
        scene.close()

    assert [outcome.token_ids for outcome in guessing] == 3 * [outcome.token_ids for outcome in alone]
    assert sum(outcome.drafts.forced_tokens for outcome in guessing) > 20
    assert all(outcome.drafts.drafted_tokens == 0 for outcome in alone)


def test_drafts_keep_to_the_grammar_of_an_answer_that_was_offloaded(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Put off the device again and again by requests of a higher tier, an answer goes on as it would have, and so do
    the guesses of it."""
    guesser = Scene(ManualClock(), max_running=4)
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
    alone = [scene.submit(**job) for job in jobs]
    scene.finish()

    assert [outcome.error for outcome in guessing] == [None] * len(jobs)
    assert [outcome.token_ids for outcome in guessing] == [outcome.token_ids for outcome in alone]
    assert preemptions > len(jobs)
    assert "grammar_mask_failed" not in caplog.text
