"""Requests that an engine goes on with after an earlier run: their tokens are those of a run that nothing has cut.

The undisturbed runs are the reference. A cut run is one that was cancelled after some tokens; a second engine, with no
KV of the first, gets the prompt and these tokens.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.events import CacheReport, FinishReason, TokenLogprobs
from graftwork.engine.core.requests import AdapterUse, GrammarKind, GrammarSource, SessionKey, SessionUse
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import GraftworkError, InvalidRequest
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.random_models import FolderSource
from tests.hypothesis_profiles import examples

PROMPT = [5, 9, 5, 9, 12, 7, 5, 9, 5, 9, 12, 7, 30, 31, 5, 9]
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 11}
MIXTURE = (AdapterUse("sha256:wide", 0.7), AdapterUse("sha256:rooted", -0.4))
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": SEEDED | {"temperature": 1.0},
    "another choice": SEEDED | {"choice": 3},
    "penalties": SEEDED | {"presence_penalty": 0.8, "frequency_penalty": 0.6},
    "repetition penalty": SEEDED | {"repetition_penalty": 1.4},
    "greedy penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "truncation": SEEDED | {"top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "logit bias": SEEDED | {"logit_bias": ((40, 2.5), (41, -3.0))},
    "stop tokens": SEEDED | {"stop_token_ids": tuple(range(20, 28))},
    "min tokens": SEEDED | {"stop_token_ids": tuple(range(20, 60)), "min_tokens": 9},
    "log probabilities": SEEDED | {"logprobs": 3, "prompt_logprobs": 2},
    "adapter": SEEDED | {"adapter": "sha256:narrow"},
    "mixture": SEEDED | {"adapters": MIXTURE},
    "session": SEEDED | {"session": SessionUse(SessionKey("agent"), 12)},
    "prediction": {"prediction": tuple(PROMPT)},
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 3}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOSED = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {
    "calls": [{"begin": '<tool_call>{"name": "f", "arguments": ', "schema": SCHEMA, "end": "}</tool_call>"}],
    "required": True,
    "parallel": False,
}
GRAMMARS: dict[str, GrammarSource] = {
    "schema": GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "closed schema": GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(CLOSED)),
    "object": GrammarSource(GrammarKind.JSON_OBJECT, ""),
    "regex": GrammarSource(GrammarKind.REGEX, "[a-c]{3}-[0-9]{2,9}"),
    "ebnf": GrammarSource(GrammarKind.EBNF, 'root ::= "(" root ")" | [a-z]{2,12}'),
    "tool call": GrammarSource(GrammarKind.STRUCTURAL_TAG, json.dumps(TAG)),
}
DEMO_MODEL = Path(__file__).parents[2] / "demo" / "model"
END = 1017
"""The demo model's end of turn."""


class Cuts:
    """One undisturbed answer, and the runs that go on after each of its positions."""

    def __init__(self, undisturbed: EngineDriver, prompt: list[int], **options: Any) -> None:
        self.prompt = prompt
        self.options = options
        self.whole = undisturbed.run(prompt, **options)
        assert self.whole.error is None, self.whole.error

    def resumed(self, driver: EngineDriver, *, is_cached: bool) -> list[Outcome]:
        """Returns the outcomes of the runs after 0, 1, 2, … tokens. All of them share batches.

        Unless the engine may find the KV of one in the cache for another, each has a domain of its own.
        """
        tokens = self.whole.token_ids
        outcomes = [
            driver.submit(
                self.prompt,
                emitted=tokens[:cut],
                domain=b"tenant" if is_cached else b"%d" % cut,
                **self.options,
            )
            for cut in range(len(tokens) + 1)
        ]
        driver.finish()
        return outcomes

    def check(self, outcomes: list[Outcome]) -> None:
        """Asserts that each run has reported what follows its cut, and nothing else."""
        for cut, outcome in enumerate(outcomes):
            assert outcome.error is None, (cut, outcome.error)
            assert outcome.token_ids == self.whole.token_ids[cut:], cut
            assert outcome.finish is self.whole.finish, cut
            assert outcome.cache is not None
            assert outcome.cache.prompt_tokens == len(self.prompt), cut
            check_logprobs(outcome.logprobs, self.whole.logprobs[cut:])
            check_logprobs(outcome.prompt_logprobs, self.whole.prompt_logprobs if cut == 0 else [])


def check_logprobs(found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert [[token for token, _ in one.top] for one in found] == [[token for token, _ in one.top] for one in expected]


@pytest.fixture(scope="module")
def undisturbed(models: RandomModels) -> EngineDriver:
    return models.engine(max_draft_tokens=0)


def open_drafting_engine(models: RandomModels) -> EngineDriver:
    """Returns an engine for which rows cost nothing, so that it verifies every draft."""
    config = EngineConfig(
        model=models.base, dtype="float32", page_tokens=4, device_bytes=4 * 2**20, max_draft_tokens=5, max_running=7
    )
    driver = EngineDriver(build_engine(config, lambda _: models.source, ManualClock()))
    for num_rows in range(1, 400):
        driver.engine.scheduler.speculator.cost.record(num_rows, 1.0)
    return driver


@pytest.fixture(scope="module", params=["plain", "drafts"])
def second(request: pytest.FixtureRequest, models: RandomModels) -> Iterator[EngineDriver]:
    """The engine that goes on."""
    driver = open_drafting_engine(models) if request.param == "drafts" else models.engine(max_batch_tokens=24)
    yield driver
    driver.loop.check_integrity()
    if request.param == "drafts":
        assert driver.loop.stats().accepted_tokens > 100


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_cached", [False, True])
def test_a_run_cut_at_any_token_goes_on_as_if_it_had_not_been(
    undisturbed: EngineDriver, second: EngineDriver, kind: str, is_cached: bool
) -> None:
    """After each token of an answer, a second engine goes on with the same tokens and log probabilities, with and
    without drafts, whether it has the KV or computes it.
    """
    cuts = Cuts(undisturbed, PROMPT, max_tokens=26, **KINDS[kind])

    cuts.check(cuts.resumed(second, is_cached=is_cached))


def cut_after(
    driver: EngineDriver, count: int, prompt: list[int], emitted: list[int], options: dict[str, Any]
) -> list[int]:
    """Runs a request until it has reported `count` tokens or more, cancels it, and returns all tokens of its answer."""
    outcome = driver.submit(prompt, emitted=emitted, **options)
    while not outcome.is_over and len(outcome.token_ids) < count:
        driver.step()
    if not outcome.is_over:
        driver.cancel(outcome)
    return [*emitted, *outcome.token_ids]


samplings = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**64 - 1), "max_tokens": st.integers(0, 20)},
    optional={
        "temperature": st.sampled_from([0.0, 0.4, 1.0, 2.0]),
        "top_k": st.integers(1, 40),
        "min_p": st.sampled_from([0.0, 0.05]),
        "presence_penalty": st.sampled_from([-1.0, 0.5]),
        "frequency_penalty": st.sampled_from([-0.5, 1.5]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "min_tokens": st.integers(0, 8),
        "stop_token_ids": st.lists(st.integers(2, 96), max_size=20).map(tuple),
        "ignore_eos": st.booleans(),
        "logit_bias": st.just(((33, 4.0), (34, 3.0))),
        "logprobs": st.just(1),
        "prompt_logprobs": st.just(0),
        "adapters": st.sampled_from([MIXTURE, MIXTURE[:1], (AdapterUse("sha256:narrow"),)]),
        "prediction": st.just(tuple(PROMPT)),
        "session": st.just(SessionUse(SessionKey("s"), 4)),
        "domain": st.sampled_from([b"x", b"y"]),
    },
)


@settings(max_examples=examples(60))
@given(
    options=samplings,
    prompt=st.lists(st.integers(2, 12), min_size=1, max_size=30),
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=3),
)
def test_a_run_cut_several_times_ends_with_the_tokens_of_an_undisturbed_run(
    undisturbed: EngineDriver, second: EngineDriver, options: dict[str, Any], prompt: list[int], counts: list[int]
) -> None:
    """Whatever a request asks for, and wherever its runs are cut, all runs together report the undisturbed answer."""
    whole = undisturbed.run(prompt, **options)
    tokens: list[int] = []

    for count in counts:
        tokens = cut_after(second, count, prompt, tokens, options)
    rest = second.run(prompt, emitted=tokens, **options)

    assert [*tokens, *rest.token_ids] == whole.token_ids
    assert rest.finish is whole.finish


# ---- grammars -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_engines() -> Iterator[tuple[EngineDriver, EngineDriver]]:
    """Two engines over the demo model, the second one with drafts."""
    engines = []
    for max_draft_tokens in (0, 6):
        config = EngineConfig(
            model=DEMO_MODEL, device_bytes=32 * 2**20, dtype="float32", max_draft_tokens=max_draft_tokens
        )
        engines.append(EngineDriver(build_engine(config, lambda _: FolderSource({}, {}), None)))
    yield engines[0], engines[1]
    for engine in engines:
        engine.loop.check_integrity()
        engine.close()


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_constrained_answer_goes_on_in_its_grammar(
    demo_engines: tuple[EngineDriver, EngineDriver], kind: str, temperature: float
) -> None:
    """After each token of a constrained answer, a second engine goes on at the same place of the grammar."""
    options = {"grammar": GRAMMARS[kind], "temperature": temperature, "seed": 3, "frequency_penalty": 0.3}
    cuts = Cuts(demo_engines[0], list(range(20, 40)), max_tokens=40, **options)

    cuts.check(cuts.resumed(demo_engines[1], is_cached=True))

    assert len(cuts.whole.token_ids) > 2


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 6}], ids=["ignored", "banned"])
def test_a_complete_constrained_answer_ends_again(
    demo_engines: tuple[EngineDriver, EngineDriver], options: dict[str, Any]
) -> None:
    """An answer that ended because its grammar allows no further token ends in the same way after its last token."""
    cuts = Cuts(demo_engines[0], list(range(20, 40)), grammar=GrammarSource(GrammarKind.REGEX, "abc"), **options)

    cuts.check(cuts.resumed(demo_engines[1], is_cached=False))

    assert cuts.whole.finish is FinishReason.STOP
    assert END not in cuts.whole.token_ids


def test_tokens_that_the_grammar_does_not_allow_are_refused(demo_engines: tuple[EngineDriver, EngineDriver]) -> None:
    """The error names the field, the token and its index, the engine keeps nothing, and others go on."""
    driver = demo_engines[1]
    source = GrammarSource(GrammarKind.REGEX, "[a-c]{3}[0-9]{3}")
    answer = driver.run(list(range(20, 40)), grammar=source).token_ids

    bad = driver.submit(list(range(20, 40)), grammar=source, emitted=[*answer[:2], 7])
    fine = driver.submit(list(range(20, 40)), grammar=source, emitted=answer[:2])
    driver.finish()

    assert isinstance(bad.error, InvalidRequest)
    assert bad.error.param == "emitted_token_ids"
    assert "Token 7 at index 2" in bad.error.message
    assert bad.cache is None
    assert fine.token_ids == answer[2:]
    driver.loop.check_integrity()


# ---- what is reported ---------------------------------------------------------------------------------------------


def test_only_the_prompt_counts_as_prompt(models: RandomModels) -> None:
    """With four tokens a page, a cached run of ten tokens after a prompt of ten gives ten cached prompt tokens, and a cold
    one ten recomputed ones.
    """
    driver, prompt = models.engine(), PROMPT[:10]
    cold = driver.run(prompt, max_tokens=16, ignore_eos=True)
    answer = cold.token_ids

    warm = driver.run(prompt, max_tokens=16, ignore_eos=True, emitted=answer[:10])
    elsewhere = driver.run(prompt, max_tokens=16, ignore_eos=True, emitted=answer[:10], domain=b"other")

    assert warm.cache == CacheReport(device_tokens=10)
    assert elsewhere.cache is not None
    assert (elsewhere.cache.cached_tokens, elsewhere.cache.recomputed_tokens) == (0, 10)
    assert driver.loop.stats().generated_tokens == 16 + 6 + 6


@pytest.mark.parametrize(
    ("emitted", "sampling", "reason"),
    [
        ([40, 41, 1], {"max_tokens": 9}, FinishReason.STOP),
        ([40, 41, 42], {"max_tokens": 9, "stop_token_ids": (42,), "min_tokens": 2}, FinishReason.STOP),
        ([40, 41, 42], {"max_tokens": 3}, FinishReason.LENGTH),
        ([40, 41, 1], {"max_tokens": 3, "ignore_eos": True}, FinishReason.LENGTH),
        ([40] * 240, {"max_tokens": 1000}, FinishReason.LENGTH),
    ],
)
def test_an_answer_that_is_over_ends_at_once(
    models: RandomModels, emitted: list[int], sampling: dict[str, Any], reason: FinishReason
) -> None:
    """A request whose tokens end with a stop token, or reach a limit, ends before a step runs."""
    driver = models.engine()

    outcome = driver.submit(PROMPT, emitted=emitted, **sampling)

    assert outcome.finish is reason
    assert outcome.token_ids == []
    assert outcome.cache is not None
    assert outcome.cache.prompt_tokens == len(PROMPT)
    assert driver.loop.stats().steps == 0
    driver.loop.check_integrity()


@pytest.mark.parametrize(
    ("emitted", "sampling", "param"),
    [
        ([40, 97], {}, "emitted_token_ids"),
        ([40, -1], {}, "emitted_token_ids"),
        ([40] * 9, {}, "emitted_token_ids"),
        ([40] * 241, {"max_tokens": 1000}, "emitted_token_ids"),
        ([1, 40], {}, "emitted_token_ids"),
        ([40, 50, 41], {"stop_token_ids": (50,)}, "emitted_token_ids"),
        ([40, 1], {"min_tokens": 2}, "emitted_token_ids"),
        ([40], {"temperature": 0.5}, "seed"),
    ],
)
def test_tokens_that_no_run_can_have_generated_are_refused(
    models: RandomModels, emitted: list[int], sampling: dict[str, Any], param: str
) -> None:
    """Tokens outside the vocabulary, above a limit, or after a token that ends the answer are refused, as is a request
    that cannot go on exactly because it names no seed.
    """
    driver = models.engine()

    outcome = driver.submit(PROMPT, emitted=emitted, **sampling)

    assert isinstance(outcome.error, InvalidRequest)
    assert outcome.error.param == param
    assert isinstance(outcome.error, GraftworkError)
    assert driver.loop.stats().waiting_requests == 0


def test_a_prediction_counts_over_the_whole_answer(models: RandomModels) -> None:
    """Tokens of the prediction that the earlier run has generated count as accepted."""
    driver = open_drafting_engine(models)
    answer = driver.run(PROMPT, max_tokens=12, ignore_eos=True).token_ids

    resumed = driver.run(PROMPT, max_tokens=12, ignore_eos=True, prediction=tuple(answer), emitted=answer[:8])

    assert resumed.drafts.accepted_prediction_tokens == 12
    assert resumed.drafts.rejected_prediction_tokens == 0
