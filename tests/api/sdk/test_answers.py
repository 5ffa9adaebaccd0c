"""Tests of reading answers: fields of another version cause no error."""

from graftwork.platform.answers.adapters import Adapter
from graftwork.platform.answers.chat import ChatCompletion, ChatCompletionChunk
from graftwork.platform.answers.sessions import Item, SessionState, Turn
from graftwork.platform.answers.usage import Usage


def test_nested_answers_are_typed() -> None:
    """Objects within lists within objects are read into their classes."""
    function = {"name": "f", "arguments": "{}"}
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "function": function}]}

    read = ChatCompletion.read(
        {"id": "c", "choices": [{"index": 0, "message": message}], "usage": {"prompt_tokens": 3}}
    )

    calls = read.choices[0].message.tool_calls
    assert calls is not None
    assert (calls[0].id, calls[0].function.name) == ("call_1", "f")
    assert read.usage is not None
    assert read.usage.prompt_tokens == 3
    assert read.text == ""


def test_missing_and_unknown_fields_are_tolerated() -> None:
    """Missing fields take defaults, unknown ones stay in `raw`, null stays None."""
    read = SessionState.read({"id": "ses_1", "head": None, "colour": "red"})

    assert (read.id, read.status, read.head) == ("ses_1", "", None)
    assert read.raw["colour"] == "red"


def test_unexpected_kinds_are_handed_through() -> None:
    """A field of an unexpected kind does not break the others."""
    read = Adapter.read({"name": "a", "versions": "many", "aliases": {"prod": {"version": 1}}})

    assert read.raw["versions"] == "many"
    assert read.aliases == {"prod": {"version": 1}}


def test_cached_share_needs_no_prompt() -> None:
    """An empty prompt has a cached share of 0."""
    usage = Usage.read({"prompt_tokens": 8, "prompt_tokens_details": {"cached_tokens": 6}})

    assert usage.cached_share == 0.75
    assert Usage.read({}).cached_share == 0.0


def test_text_of_items_in_both_forms() -> None:
    """A message's content is a string or a list of parts; a call has no text."""
    parts = [{"type": "output_text", "text": "Hel"}, {"type": "output_text", "text": "lo"}, {"type": "image"}]

    turn = Turn.read({"output": [{"type": "message", "content": parts}, {"type": "function_call", "name": "f"}]})

    assert turn.text == "Hello"
    assert Item.read({"type": "message", "content": "Hi"}).text == "Hi"


def test_chunks_without_choices_have_no_text() -> None:
    """The last chunk of a stream carries only the usage."""
    assert ChatCompletionChunk.read({"choices": [], "usage": {"total_tokens": 5}}).text == ""
