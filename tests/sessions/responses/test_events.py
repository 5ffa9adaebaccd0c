"""Tests of a turn's events as a response's events, with the SDK's types and accumulator."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from graftwork.platform.ids import SessionId, TurnId
from graftwork.sessions.core.events import EventDraft, EventType, number_events
from graftwork.sessions.core.session import Turn, TurnStatus
from graftwork.sessions.responses.events import ResponseEvents
from graftwork.sessions.responses.record import ResponseRecord
from tests.hypothesis_profiles import examples

TURN, SESSION = TurnId("turn_1"), SessionId("chain_1")
ECHO = {
    "background": False,
    "store": True,
    "model": "tiny",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

texts = st.tuples(st.just("text"), st.lists(st.sampled_from(["Hello", " ", "\n", "there é"]), min_size=1, max_size=3))
calls = st.tuples(st.just("call"), st.lists(st.sampled_from(['{"a": ', "1", "}", "{}"]), max_size=4))
pieces = st.lists(texts | calls, max_size=5)
ends = st.sampled_from(
    [
        (TurnStatus.COMPLETED, "stop"),
        (TurnStatus.COMPLETED, "length"),
        (TurnStatus.AWAITING_TOOL, "tool_calls"),
        (TurnStatus.FAILED, None),
        (TurnStatus.CANCELLED, None),
    ]
)


def drafts_of(answer: Sequence[tuple[str, list[str]]]) -> list[EventDraft]:
    """The events of a random answer."""
    drafts = [EventDraft(EventType.TURN_CREATED, {"cache": None})]
    for number, (kind, deltas) in enumerate(answer):
        if kind == "text":
            drafts += [EventDraft(EventType.OUTPUT_TEXT_DELTA, {"delta": delta}) for delta in deltas]
            continue
        call = {"call_id": f"call_{number}", "name": "f"}
        drafts.append(EventDraft(EventType.TOOL_CALL_STARTED, call))
        drafts += [EventDraft(EventType.TOOL_CALL_ARGUMENTS_DELTA, {**call, "delta": delta}) for delta in deltas]
        drafts.append(EventDraft(EventType.TOOL_CALL_DONE, {**call, "arguments": "".join(deltas)}))
    return drafts


def ended(status: TurnStatus, reason: str | None) -> Turn:
    error = {"type": "overloaded_error", "message": "gone"} if status is TurnStatus.FAILED else None
    return Turn(TURN, SESSION, status, None, 1, (), 0.0, finish_reason=reason, usage=USAGE, error=error)


def read(drafts: Sequence[EventDraft], turn: Turn, *, background: bool = False) -> list[dict[str, Any]]:
    reading = ResponseEvents(ResponseRecord(TURN, SESSION, ECHO | {"background": background}, 0.0))
    events = reading.begin()
    for event in number_events(drafts, SESSION, TURN, len(drafts)):
        events += reading.read(event)
    return events + reading.end(turn)


@settings(max_examples=examples(60))
@given(pieces, ends, st.booleans())
def test_the_sdk_accumulates_the_same_response(
    answer: list[tuple[str, list[str]]], end: tuple[TurnStatus, str | None], background: bool
) -> None:
    """Numbers have no gap, every event is valid, and the SDK's accumulator ends with the last event's output."""
    events = read(drafts_of(answer), ended(*end), background=background)

    parsed = [EVENT.validate_python(event) for event in events]
    state: ResponseStreamState[None] = ResponseStreamState(input_tools=omit, text_format=omit)
    told = {}
    for accumulated in [more for event in parsed for more in state.handle_event(event)]:
        if accumulated.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
            told[accumulated.output_index] = accumulated.snapshot
    final = events[-1]["response"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [told.get(index, "") for index in range(len(final["output"]))] == [text_of(i) for i in final["output"]]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == final["output"]
    assert {item["status"] for item in final["output"]} <= {"completed", "incomplete"}


@given(pieces, ends)
def test_nothing_that_was_said_is_lost(answer: list[tuple[str, list[str]]], end: tuple[TurnStatus, str | None]) -> None:
    """The output has all text and all arguments in order, without the white space around calls."""
    final = read(drafts_of(answer), ended(*end))[-1]["response"]

    said = "".join("".join(deltas) for kind, deltas in answer if kind == "text")
    shown = "".join(text_of(item) for item in final["output"] if item["type"] == "message")
    assert "".join(shown.split()) == "".join(said.split())
    arguments = ["".join(deltas) for kind, deltas in answer if kind == "call"]
    assert [item["arguments"] for item in final["output"] if item["type"] == "function_call"] == arguments


def text_of(item: dict[str, Any]) -> str:
    """The text of a message, or the arguments of a call."""
    return "".join(part["text"] for part in item["content"]) if item["type"] == "message" else item["arguments"]


@pytest.mark.parametrize(
    ("end", "status", "name"),
    [
        ((TurnStatus.COMPLETED, "stop"), "completed", "response.completed"),
        ((TurnStatus.COMPLETED, "length"), "incomplete", "response.incomplete"),
        ((TurnStatus.AWAITING_TOOL, "tool_calls"), "completed", "response.completed"),
        ((TurnStatus.FAILED, None), "failed", "response.failed"),
        ((TurnStatus.CANCELLED, None), "cancelled", "response.incomplete"),
    ],
)
def test_ends(end: tuple[TurnStatus, str | None], status: str, name: str) -> None:
    """Each end of a turn has its status and its event; only a cut answer is `incomplete` with a reason."""
    last = read(drafts_of([("text", ["Hello"])]), ended(*end))[-1]

    response = last["response"]
    assert (last["type"], response["status"]) == (name, status)
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if status == "incomplete" else None)
    assert (response["error"] is not None) == (status == "failed")
    assert response["output"][0]["status"] == ("completed" if status == "completed" else "incomplete")
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 4


def test_a_call_that_was_cut_is_incomplete_and_a_whole_one_is_not() -> None:
    """Only the call that the token limit cut is incomplete; a complete call is closed before the next item."""
    answer = [("call", ['{"a": 1}']), ("call", ['{"a'])]

    events = read(drafts_of(answer), ended(TurnStatus.COMPLETED, "length"))

    output = events[-1]["response"]["output"]
    assert [(json.dumps(item["arguments"]), item["status"]) for item in output] == [
        (json.dumps('{"a": 1}'), "completed"),
        (json.dumps('{"a'), "incomplete"),
    ]
    names = [event["type"].removeprefix("response.") for event in events]
    first_done = names.index("output_item.done")
    assert names[first_done - 1 : first_done + 2] == [
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
    ]


def test_a_complete_call_stays_complete() -> None:
    """A complete call stays complete if the response fails after it."""
    (item,) = read(drafts_of([("call", ["{}"])]), ended(TurnStatus.FAILED, None))[-1]["response"]["output"]

    assert item["status"] == "completed"


@pytest.mark.parametrize(("text_after", "said"), [(["\n", " "], []), (["\n", "Done."], ["\nDone."])])
def test_white_space_after_a_call(text_after: list[str], said: list[str]) -> None:
    """White space after a call makes no message; it is part of the text after it, if any."""
    answer = [("call", ["{}"]), ("text", text_after)]

    events = read(drafts_of(answer), ended(TurnStatus.AWAITING_TOOL, "tool_calls"))

    output = events[-1]["response"]["output"]
    assert [text_of(item) for item in output] == ["{}", *said]


def test_silence_is_an_empty_message() -> None:
    """An empty answer is an empty message, as it is stored."""
    (item,) = read(drafts_of([]), ended(TurnStatus.COMPLETED, "stop"))[-1]["response"]["output"]

    assert (item["type"], item["content"][0]["text"]) == ("message", "")
