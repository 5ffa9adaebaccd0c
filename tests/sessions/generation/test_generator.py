"""Tests of a generation: the engine's tokens become text and tool calls."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.adapters.format.specs import AdapterVersion, ResolvedModel
from graftwork.engine.core.events import CacheReport, FinishReason
from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.core.sampling import SamplingParams
from graftwork.platform.errors import InternalFailure, Unavailable
from graftwork.platform.ids import AdapterId, IsolationDomain, RequestId
from graftwork.sessions.generation.generator import (
    GenerationEvent,
    GenerationFinished,
    PromptAdmitted,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from graftwork.sessions.generation.request import GenerationRequest
from graftwork.sessions.text.messages import Message, ToolCall
from graftwork.sessions.text.tokenizer import TextTokenizer
from tests.hypothesis_profiles import examples
from tests.sessions.scripted_engine import ScriptedEngine, generator_on
from tests.sessions.tokenizer_and_templates import (
    arguments,
    chat_template,
    names,
    text_tokenizer,
    texts,
    token_id,
    tokenizer_json,
)

END = token_id("<|im_end|>")
BASE = ResolvedModel("tiny", None)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def request(
    *,
    stop: tuple[str, ...] = (),
    calls: bool = False,
    parallel: bool = True,
    sampling: SamplingParams | None = None,
    resolved: ResolvedModel = BASE,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId("req_1"),
        prompt_token_ids=(1, 2, 3),
        sampling=sampling or SamplingParams(max_tokens=99),
        stop=stop,
        resolved=resolved,
        isolation=IsolationDomain(b"tenant"),
        weight=2.0,
        tier=ServiceTier.FLEX,
        parse_tool_calls=calls,
        parallel_tool_calls=parallel,
    )


def spelled(text: str) -> tuple[int, ...]:
    return text_tokenizer().encode(text, allow_special=True)


def one_by_one(text: str, *, ends: bool = True) -> list[tuple[int, ...]]:
    return [(token,) for token in (*spelled(text), *([END] if ends else []))]


async def events_of(engine: ScriptedEngine, wanted: GenerationRequest) -> list[GenerationEvent]:
    return [event async for event in generator_on(engine).start(wanted).events()]


async def finish_of(engine: ScriptedEngine, wanted: GenerationRequest) -> GenerationFinished:
    return finished(await events_of(engine, wanted))


def finished(events: list[GenerationEvent]) -> GenerationFinished:
    assert isinstance(events[-1], GenerationFinished)
    return events[-1]


def spoken(events: list[GenerationEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def test_text_streams_and_is_summed_up() -> None:
    """A plain answer is admitted, streams its text, and finishes with its tokens and the cache's report."""
    report = CacheReport(device_tokens=2, recomputed_tokens=1)
    engine = ScriptedEngine(one_by_one("The weather 🙂"), cache=report)

    events = await events_of(engine, request())

    assert events[0] == PromptAdmitted(report)
    assert spoken(events) == "The weather 🙂"
    assert finished(events) == GenerationFinished(
        reason="stop", token_ids=(*spelled("The weather 🙂"), END), text="The weather 🙂", tool_calls=(), cache=report
    )
    assert finished(events).completion_tokens == len(spelled("The weather 🙂")) + 1
    assert engine.cancelled == []


async def test_engine_is_asked_what_was_requested() -> None:
    """The engine's request carries ids, the adapter's digest and the domain's weight; no text."""
    version = AdapterVersion(AdapterId("adp_1"), "tone", 3, "sha256:1", 8, ("q_proj",), 10, 0.0)
    engine = ScriptedEngine([(END,)])
    wanted = request(resolved=ResolvedModel("tone@prod", version))

    await events_of(engine, wanted)

    (asked,) = engine.requests
    assert (asked.request_id, asked.prompt_token_ids, asked.sampling) == ("req_1", (1, 2, 3), wanted.sampling)
    assert (asked.adapter_digests, asked.domain) == (("sha256:1",), b"tenant")
    assert (asked.weight, asked.tier) == (2.0, ServiceTier.FLEX)


def test_a_request_without_a_seed_gets_one() -> None:
    """Each request without a seed gets another one, which a double holds exactly; a given seed stays, also 0."""
    generator = generator_on(ScriptedEngine([(END,)]))
    given = request(sampling=SamplingParams(max_tokens=9, seed=0))

    seeds = [generator.prepared(request()).sampling.seed for _ in range(50)]

    assert len(set(seeds)) == 50
    assert all(seed is not None and int(float(seed)) == seed for seed in seeds)
    assert generator.prepared(given) == given


async def test_length_limit_is_reported() -> None:
    """An answer cut by the token limit has the reason `length`, and an incomplete character becomes U+FFFD."""
    half = spelled("🙂")[:2]
    events = await events_of(ScriptedEngine([half], FinishReason.LENGTH), request())

    assert (finished(events).reason, finished(events).text) == ("length", "\ufffd")


async def test_stop_string_cancels_the_engine() -> None:
    """A stop string ends the text before itself; the tokens of the step are kept."""
    engine = ScriptedEngine([spelled("one STOP two"), spelled("three")])

    done = await finish_of(engine, request(stop=(" STOP",)))

    assert (done.reason, done.text) == ("stop", "one")
    assert text_tokenizer().decode(done.token_ids) == "one STOP"
    assert engine.cancelled == ["req_1"]


async def test_beginning_of_a_stop_string_is_given_back() -> None:
    """Text that was held back for a stop string is sent when the stop string does not come."""
    done = await finish_of(ScriptedEngine(one_by_one("one ST")), request(stop=("STOP",)))

    assert (done.reason, done.text) == ("stop", "one ST")


async def test_stop_strings_wait_for_the_least_number_of_tokens() -> None:
    """Stop strings are ignored in the first `min_tokens` tokens."""
    sampling = SamplingParams(max_tokens=99, min_tokens=len(spelled("a.b.")))

    done = await finish_of(ScriptedEngine(one_by_one("a.b.c.d")), request(stop=(".",), sampling=sampling))

    assert done.text == "a.b.c"


async def test_calls_are_events() -> None:
    """Text and two calls become events; the white space between them is dropped."""
    engine = ScriptedEngine(one_by_one(f"Let me see.\n{CALL}\n{CALL}"))

    events = await events_of(engine, request(calls=True))

    first, second = finished(events).tool_calls
    assert [type(event) for event in events if not isinstance(event, TextDelta | ToolCallArgumentsDelta)] == [
        PromptAdmitted,
        *[ToolCallStarted, ToolCallFinished] * 2,
        GenerationFinished,
    ]
    assert (finished(events).reason, spoken(events), finished(events).text) == ("tool_calls", *["Let me see."] * 2)
    assert (first.index, second.index, first.name, first.arguments) == (0, 1, "f", '{"a": 1}')
    assert first.call_id != second.call_id
    assert first.call_id.startswith("call_")
    for call in (first, second):
        deltas = [event.delta for event in events if isinstance(event, ToolCallArgumentsDelta)]
        ids = {event.call_id for event in events if isinstance(event, ToolCallStarted)}
        assert "".join(deltas) == call.arguments * 2
        assert call.call_id in ids


async def test_markup_is_text_where_no_tools_are_in_use() -> None:
    """Without `parse_tool_calls` all output is text."""
    done = await finish_of(ScriptedEngine(one_by_one(CALL)), request())

    assert (done.reason, done.text, done.tool_calls) == ("stop", CALL, ())


async def test_stop_strings_do_not_fire_inside_a_call() -> None:
    """A stop string inside a call is part of the call; after the call it ends the answer."""
    done = await finish_of(ScriptedEngine(one_by_one(f"{CALL}\n{CALL} a1b")), request(calls=True, stop=("1", "\n")))

    assert (done.reason, done.text, len(done.tool_calls)) == ("tool_calls", " a", 2)


async def test_a_call_ends_what_may_have_been_a_stop_string() -> None:
    """A stop string never matches across a call."""
    done = await finish_of(ScriptedEngine(one_by_one(f"one ST{CALL}OP")), request(calls=True, stop=("STOP",)))

    assert (done.reason, done.text, len(done.tool_calls)) == ("tool_calls", "one STOP", 1)


async def test_white_space_at_the_end_of_text_is_kept() -> None:
    """White space that no call follows is text."""
    done = await finish_of(ScriptedEngine(one_by_one("one \n")), request(calls=True))

    assert done.text == "one \n"


async def test_stop_string_before_a_call_prevents_it() -> None:
    """A stop string ends the answer even if a call would follow."""
    engine = ScriptedEngine(one_by_one(f"one\n{CALL}"))

    done = await finish_of(engine, request(calls=True, stop=("\n",)))

    assert (done.reason, done.text, done.tool_calls) == ("stop", "one", ())
    assert text_tokenizer().decode(done.token_ids) == "one\n"


async def test_only_one_call_where_one_is_wanted() -> None:
    """Without parallel calls the engine's request is cancelled after the first call."""
    engine = ScriptedEngine(one_by_one(f"{CALL}\n{CALL}"))

    done = await finish_of(engine, request(calls=True, parallel=False))

    assert (done.reason, len(done.tool_calls)) == ("tool_calls", 1)
    assert text_tokenizer().decode(done.token_ids) == CALL
    assert engine.cancelled == ["req_1"]


async def test_call_that_the_limit_cut_short_is_reported_as_the_limit() -> None:
    """A call cut by the token limit is incomplete, and the reason is `length`."""
    engine = ScriptedEngine(one_by_one(CALL.partition("1")[0], ends=False), FinishReason.LENGTH)

    done = await finish_of(engine, request(calls=True, parallel=False))

    (call,) = done.tool_calls
    assert (done.reason, call.complete, call.arguments) == ("length", False, '{"a": ')


async def test_broken_markup_is_text() -> None:
    """Markup without a call in it is returned as text, with the white space before it."""
    text = "See:\n<tool_call>f(1)</tool_call>"

    done = await finish_of(ScriptedEngine(one_by_one(text)), request(calls=True))

    assert (done.reason, done.text, done.tool_calls) == ("stop", text, ())


async def test_markers_that_are_special_tokens_are_seen() -> None:
    """Calls are found even if their markers are special tokens, which are not part of the text."""
    tokenizer = TextTokenizer(tokenizer_json(), ["<tool_call>", "</tool_call>"])
    generator = replace(generator_on(ScriptedEngine(one_by_one(CALL))), tokenizer=tokenizer)

    events = [event async for event in generator.start(request(calls=True)).events()]

    assert [call.name for call in finished(events).tool_calls] == ["f"]


async def test_stop_token_is_no_text() -> None:
    """A stop token is in the tokens but not in the text; with `ignore_eos` the model's own stop tokens are text."""
    token = spelled("a")[0]
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(token,), ignore_eos=True)
    engine = ScriptedEngine([*one_by_one("b"), *one_by_one("c", ends=False), (token,)])

    done = await finish_of(engine, request(sampling=sampling))

    assert (done.text, done.token_ids) == ("bc", (*spelled("b"), END, *spelled("c"), token))


async def test_closing_the_stream_cancels_the_request() -> None:
    """Closing the events early cancels the engine's request."""
    engine = ScriptedEngine(one_by_one("one two three"))
    stream = generator_on(engine).start(request()).events()

    await anext(stream)
    await anext(stream)
    await stream.aclose()

    assert engine.cancelled == ["req_1"]


async def test_engine_errors_pass_through() -> None:
    """An error of the engine is raised unchanged."""
    engine = ScriptedEngine(one_by_one("one"), failure=Unavailable("The engine is gone."))

    with pytest.raises(Unavailable):
        await events_of(engine, request())


async def test_stream_without_an_end_is_an_error() -> None:
    """A stream that ends without its last event is an internal failure, not an answer."""
    with pytest.raises(InternalFailure, match="broke off"):
        await events_of(ScriptedEngine(one_by_one("one"), reason=None), request())


async def test_finished_answer_is_a_message() -> None:
    """The output becomes the assistant's message of the next prompt."""
    done = await finish_of(ScriptedEngine(one_by_one(f"Well.\n{CALL}")), request(calls=True))

    message = done.message()

    assert (message.role, message.content) == ("assistant", "Well.")
    assert message.tool_calls == (ToolCall(done.tool_calls[0].call_id, "f", '{"a": 1}'),)


@given(text=texts, given_arguments=arguments, seed=st.integers(0, 99), stop=st.sampled_from(["", "é", "\n", "a"]))
@settings(max_examples=examples(40))
async def test_steps_make_no_difference(text: str, given_arguments: dict[str, object], seed: int, stop: str) -> None:
    """The answer does not depend on how many tokens a step has."""
    whole = text + '<tool_call>{"name": "f", "arguments": ' + json.dumps(given_arguments) + "}</tool_call>" + text
    tokens = [*spelled(whole), END]
    cuts = random.Random(seed)
    steps, left = [], tokens
    while left:
        size = cuts.randint(1, 5)
        steps.append(tuple(left[:size]))
        left = left[size:]
    wanted = request(calls=True, stop=(stop,) if stop else ())

    by_one = await finish_of(ScriptedEngine([(token,) for token in tokens]), wanted)
    by_steps = await finish_of(ScriptedEngine(steps), wanted)

    assert (by_steps.text, by_steps.token_ids, by_steps.reason) == (by_one.text, by_one.token_ids, by_one.reason)
    assert [call.arguments for call in by_steps.tool_calls] == [call.arguments for call in by_one.tool_calls]


@given(text=texts.map(str.rstrip), calls=st.lists(st.tuples(names, arguments), max_size=2))
@settings(max_examples=examples(40))
async def test_what_the_template_writes_is_read_back(text: str, calls: list[tuple[str, dict[str, object]]]) -> None:
    """A message that the model wrote as the template does renders to the same text."""
    template = chat_template()
    called = tuple(ToolCall("call_1", name, json.dumps(given)) for name, given in calls)
    rendered = template.render((Message("assistant", text, called),), add_generation_prompt=False)
    written = rendered.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")

    done = await finish_of(ScriptedEngine(one_by_one(written)), request(calls=True))

    assert template.render((done.message(),), add_generation_prompt=False) == rendered
    assert (done.message().content, len(done.tool_calls)) == (text, len(calls))
