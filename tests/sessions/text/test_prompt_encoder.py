"""Tests of prompt encoding: equal to transformers, and text never becomes control tokens."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.platform.errors import InternalFailure, InvalidRequest
from graftwork.sessions.text.messages import Message, ToolCall, messages_from_chat
from tests.hypothesis_profiles import examples
from tests.sessions.reference_templates import REFERENCES
from tests.sessions.tokenizer_and_templates import (
    CHATML,
    HEADERS,
    SPECIAL,
    TEMPLATES,
    VISIBLE,
    as_sent,
    conversations,
    prompt_encoder,
    text_tokenizer,
    token_id,
    tools,
)

DATE = {"date_string": "14 Nov 2023"}
CONTROL = frozenset(text_tokenizer().added_tokens)
hostile = st.lists(st.sampled_from([*SPECIAL, *VISIBLE, "<|im_", "start|>", "a", " ", "é", "\ufdd0", "\n"])).map(
    "".join
)


def controls(token_ids: tuple[int, ...], control: frozenset[int] = CONTROL) -> list[int]:
    return [token_id for token_id in token_ids if token_id in control]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=examples(30))
@given(conversation=conversations(), tools=tools)
def test_ids_are_those_of_transformers(
    name: str, conversation: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    """Without control literals in the text, the ids are those of apply_chat_template(tokenize=True)."""
    expected = REFERENCES[name].apply_chat_template(
        conversation, tools=tools or None, add_generation_prompt=True, return_dict=False, **DATE
    )

    token_ids = prompt_encoder(TEMPLATES[name]).encode_messages(
        messages_from_chat(as_sent(conversation)), tools or None, variables=DATE
    )

    assert list(token_ids) == expected


@settings(max_examples=examples(30))
@given(system=hostile, user=hostile, result=hostile, argument=hostile)
def test_sanitised_ids_are_those_of_transformers(system: str, user: str, result: str, argument: str) -> None:
    """With control literals, the ids are those of transformers with sanitize_control_tokens=True."""
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"x": argument}}}
            ],
        },
        {"role": "tool", "content": result, "tool_call_id": "call_1"},
    ]
    expected = REFERENCES["chatml"].apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False, sanitize_control_tokens=True
    )

    token_ids = prompt_encoder().encode_messages(messages_from_chat(as_sent(conversation)))

    assert list(token_ids) == expected


@pytest.mark.parametrize("source", [CHATML, HEADERS])
@settings(max_examples=examples(30))
@given(user=hostile, result=hostile, description=hostile, key=hostile)
def test_text_from_outside_makes_no_control_token(
    source: str, user: str, result: str, description: str, key: str
) -> None:
    """Whatever users, tools and schemas say, the control tokens are those of the same prompt with harmless text.

    An added token that is neither special nor written by the template, as in the second one, is an ordinary word.
    """
    encoder = prompt_encoder(source)
    control = CONTROL if source == CHATML else text_tokenizer().special_ids

    def prompt(user: str, result: str, description: str, key: str) -> tuple[int, ...]:
        call = ToolCall("call_1", "f", json.dumps({key: user}))
        messages = [
            Message(role="user", content=user),
            Message(role="assistant", tool_calls=(call,)),
            Message(role="tool", content=result, tool_call_id="call_1"),
        ]
        return encoder.encode_messages(messages, [{"description": description, key: 1}], variables=DATE)

    assert controls(prompt(user, result, description, key), control) == controls(prompt("a", "b", "c", "d"), control)


@settings(max_examples=examples(30))
@given(user=hostile)
def test_text_from_outside_is_not_changed(user: str) -> None:
    """Escaping leaves no marks: the prompt decodes to what the template renders."""
    encoder = prompt_encoder()
    messages = [Message(role="user", content=user)]

    token_ids = encoder.encode_messages(messages)

    assert text_tokenizer().decode(token_ids, skip_special_tokens=False) == encoder.template.render(messages)


def test_escaped_literal_in_arguments_is_text() -> None:
    """A control token that appears only after the arguments are parsed is escaped too."""
    call = ToolCall("call_1", "f", '{"x": "\\u003c|im_end|>"}')

    token_ids = prompt_encoder().encode_messages([Message(role="assistant", tool_calls=(call,))])

    assert token_ids.count(token_id("<|im_end|>")) == 1


def test_markup_of_an_assistant_stays_markup() -> None:
    """An assistant's text keeps its call markup, but its stop tokens are escaped."""
    said = Message(role="assistant", content="<tool_call>broken</tool_call><|im_end|>")

    token_ids = prompt_encoder().encode_messages([said], add_generation_prompt=False)

    assert token_ids.count(token_id("<tool_call>")) == 1
    assert token_ids.count(token_id("<|im_end|>")) == 1


@settings(max_examples=examples(30))
@given(conversation=conversations(), tools=tools)
def test_pieces_make_the_whole_prompt(conversation: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    """The ids of the first prompt, generated messages and deltas join to those of the whole conversation."""
    encoder = prompt_encoder()
    messages = messages_from_chat([*as_sent(conversation), {"role": "user", "content": "And now?"}])
    spoken = [position for position, message in enumerate(messages) if message.role == "assistant"]
    joined = encoder.encode_messages(messages[: spoken[0]], tools or None)
    for position, following in zip(spoken, [*spoken[1:], len(messages)], strict=True):
        before = encoder.template.render(messages[:position], tools or None)
        after = encoder.template.render(messages[: position + 1], tools or None, add_generation_prompt=False)
        joined += text_tokenizer().encode(after.removeprefix(before).removesuffix("\n"), allow_special=True)
        joined += encoder.encode_delta(messages[position], messages[position + 1 : following], closed=True)

    assert joined == encoder.encode_messages(messages, tools or None)


@settings(max_examples=examples(30))
@given(user=hostile, said=hostile)
def test_delta_makes_no_control_token_of_text(user: str, said: str) -> None:
    """A user's text in a later turn stays text, whatever the assistant's message spells."""
    delta = prompt_encoder().encode_delta(
        Message(role="assistant", content=said), [Message(role="user", content=user)], closed=False
    )

    assert [text_tokenizer().token_text(control) for control in controls(delta)] == [
        "<|im_end|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
    ]


def test_stop_token_that_an_assistant_spells_ends_no_turn() -> None:
    """A delta continues only from the template's own stop token."""
    encoder = prompt_encoder("{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}")

    with pytest.raises(InternalFailure, match="stop token"):
        encoder.encode_delta(Message("assistant", "<|im_end|>"), [Message("user", "Hi")], closed=True)


def test_turn_ends_with_a_stop_token() -> None:
    """`ends_turn` is true only if the last token is a stop token."""
    encoder = prompt_encoder()

    assert encoder.ends_turn((5, token_id("<|im_end|>")))
    assert not encoder.ends_turn((token_id("<|im_end|>"), 5))
    assert not encoder.ends_turn(())


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=examples(30))
@given(
    begun=st.text("ab é.\n", min_size=1).filter(str.strip),
    system=st.text("ab <", max_size=5),
)
def test_an_open_message_is_that_of_transformers(name: str, begun: str, system: str) -> None:
    """With continue_final_message, the ids are those of transformers, white space at the end of the text included."""
    conversation = [
        *([{"role": "system", "content": system}] if system.strip() else []),
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": begun},
    ]
    expected = REFERENCES[name].apply_chat_template(
        conversation, continue_final_message=True, return_dict=False, **DATE
    )

    token_ids = prompt_encoder(TEMPLATES[name]).encode_messages(
        messages_from_chat(conversation), variables=DATE, continue_final_message=True
    )

    assert list(token_ids) == expected


def test_an_open_message_keeps_control_tokens_out() -> None:
    """The spelling of a control token in the open message stays plain text, and the answer continues right after it."""
    encoder = prompt_encoder(CHATML)
    messages = messages_from_chat(
        [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "so <|im_end|>"}]
    )

    token_ids = encoder.encode_messages(messages, continue_final_message=True)

    assert encoder.tokenizer.decode(token_ids, skip_special_tokens=False).endswith("assistant\nso <|im_end|>")
    assert controls(token_ids).count(token_id("<|im_end|>")) == 1


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
    ],
)
def test_only_an_assistants_text_can_stay_open(last: dict[str, Any]) -> None:
    """A last message of another role, or with calls, cannot be continued; the error names the message."""
    messages = messages_from_chat([{"role": "user", "content": "Go"}, last])

    with pytest.raises(InvalidRequest) as refusal:
        prompt_encoder(CHATML).encode_messages(messages, continue_final_message=True)

    assert refusal.value.param == "messages[1]"
