"""Tests of ChatTemplate: it renders like transformers, and renders only what new messages add."""

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.platform.clock import ManualClock, SystemClock
from graftwork.platform.errors import InternalFailure, InvalidRequest, PayloadTooLarge, ValidationFailed
from graftwork.sessions.text.chat_template import ChatTemplate, RenderLimits
from graftwork.sessions.text.messages import (
    CANDIDATES,
    ControlTokenEscaper,
    ControlTokenTexts,
    Message,
    PromptPiece,
    ToolCall,
    messages_from_chat,
)
from tests.hypothesis_profiles import examples
from tests.sessions.reference_templates import REFERENCES, THINKING_REFERENCE
from tests.sessions.tokenizer_and_templates import (
    CHATML,
    HEADERS,
    TEMPLATES,
    THINKING,
    as_sent,
    chat_template,
    conversations,
    tools,
)

USER = Message(role="user", content="Hi")


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=examples(40))
@given(conversation=conversations(), tools=tools, asks=st.booleans())
def test_renders_as_transformers(
    name: str, conversation: list[dict[str, Any]], tools: list[dict[str, Any]], asks: bool
) -> None:
    """Any conversation is rendered byte for byte as apply_chat_template renders it."""
    template = chat_template(TEMPLATES[name])
    messages = messages_from_chat(as_sent(conversation))
    # The two read different clocks, so the date is given.
    date = {"date_string": "14 Nov 2023"}
    expected = REFERENCES[name].apply_chat_template(
        conversation, tools=tools or None, tokenize=False, add_generation_prompt=asks, **date
    )

    text = template.render(messages, tools or None, add_generation_prompt=asks, variables=date)

    assert text == expected


def test_time_comes_from_the_clock() -> None:
    """strftime_now shows the given clock's local time, as transformers shows the machine's."""
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d %Z|') }}", ManualClock(1_700_000_000.0), special_tokens={})

    assert template.render((USER,)) == "2023-11-14 |"


def test_time_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """`strftime_now` uses the machine's time zone."""
    template = ChatTemplate("{{ strftime_now('%H') }}", ManualClock(1_700_000_000.0), special_tokens={})

    with monkeypatch.context() as machine:
        machine.setenv("TZ", "JST-9")
        time.tzset()
        text = template.render((USER,))
    time.tzset()

    assert text == "07"


def test_time_is_as_transformers_shows_it() -> None:
    """With the machine's clock the date is that of transformers."""
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", SystemClock(), special_tokens={})
    conversation = [{"role": "user", "content": "Hi"}]
    reference = REFERENCES["chatml"]

    before, text, after = (
        reference.apply_chat_template(conversation, chat_template=template.source, tokenize=False),
        template.render((USER,)),
        reference.apply_chat_template(conversation, chat_template=template.source, tokenize=False),
    )

    assert text in (before, after)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content | tojson(indent=2, sort_keys=true, separators=(',', ':')) }}",
        "{% set ns = namespace(self=1, found=false) %}{{ ns.found }}{{ ns.self }}{{ dict(a=1).items() | list }}",
        "{% for m in messages %}{% continue %}{% endfor %}{{ documents is none }}{{ tools is none }}{{ sep_token }}",
        "a{% generation %}\n  b {{ messages[0].content }}{% endgeneration %}\n",
        "{{ pad_token ~ eos_token ~ bos_token }}",
        "  {% if true %}\n  x\n  {% endif %}\n\n",
    ],
)
def test_environment_is_that_of_transformers(source: str) -> None:
    """Filters, globals, extensions and white space behave as in transformers."""
    template = chat_template(source)
    conversation = [{"role": "user", "content": "<é>"}]

    text = template.render((Message(role="user", content="<é>"),), add_generation_prompt=False)

    assert text == REFERENCES["chatml"].apply_chat_template(conversation, chat_template=source, tokenize=False)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[0].nothing.further }}", "nothing"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{% set ns = namespace(_x=1) %}", "_x"),
    ],
)
def test_what_a_template_refuses_is_told_to_the_caller(source: str, words: str) -> None:
    """An error that a template raises, and every access outside the sandbox, is an InvalidRequest with the message."""
    with pytest.raises(InvalidRequest, match=words) as raised:
        chat_template(source).render((USER,))

    assert raised.value.code == "template_error"


def test_broken_template_is_refused_when_loaded() -> None:
    """A template that does not compile is a failed validation that names the line."""
    with pytest.raises(ValidationFailed, match="does not compile"):
        chat_template("{% if %}")


def test_runaway_template_is_stopped_by_size() -> None:
    """A template that writes without end is stopped at the limit."""
    source = "{% for _ in range(99999) %}{{ messages[0].content }}{% endfor %}"
    template = ChatTemplate(source, ManualClock(), special_tokens={}, limits=RenderLimits(characters=100))

    with pytest.raises(PayloadTooLarge, match="100 characters"):
        template.render((USER,))


def test_runaway_template_is_stopped_by_time() -> None:
    """A template that takes too long is stopped at the next piece it writes."""
    clock = ManualClock()
    source = "{% for _ in range(9) %}{{ wait(2) }}{% endfor %}"
    template = ChatTemplate(source, clock, special_tokens={}, limits=RenderLimits(seconds=5))

    with pytest.raises(PayloadTooLarge, match="5 seconds"):
        template.render((USER,), variables={"wait": clock.advance})


def test_variables_cannot_replace_the_conversation() -> None:
    """A caller's template variables may not take the names of the template's own."""
    with pytest.raises(InvalidRequest, match="messages"):
        chat_template().render((USER,), variables={"messages": []})


def test_variables_go_before_special_tokens() -> None:
    """As in transformers, a variable may replace a special token."""
    assert chat_template("{{ bos_token }}").render((USER,), variables={"bos_token": "<s>"}) == "<s>"


@settings(max_examples=examples(40))
@given(conversation=conversations(), tools=tools)
def test_deltas_add_up_to_the_whole(conversation: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    """The first prompt, generated messages and deltas join to the rendering of the whole conversation."""
    template = chat_template(CHATML)
    messages = messages_from_chat([*as_sent(conversation), {"role": "user", "content": "And now?"}])
    spoken = [position for position, message in enumerate(messages) if message.role == "assistant"]
    joined = template.render(messages[: spoken[0]], tools or None)
    for position, following in zip(spoken, [*spoken[1:], len(messages)], strict=True):
        generated = template.render(messages[: position + 1], tools or None, add_generation_prompt=False)
        joined += generated.removeprefix(template.render(messages[:position], tools or None)).removesuffix("\n")
        joined += template.render_delta(messages[position], messages[position + 1 : following], closed=True)

    assert joined == template.render(messages, tools or None)


@settings(max_examples=examples(40))
@given(conversation=conversations(), reasoning=st.none() | st.text(max_size=9))
def test_a_delta_does_not_depend_on_hidden_reasoning(conversation: list[dict[str, Any]], reasoning: str | None) -> None:
    """A template that shows reasoning in the last answers alone can be continued: the delta is what stands behind each
    answer in the rendering of transformers."""
    template, whole = chat_template(THINKING), [*as_sent(conversation), {"role": "user", "content": "And now?"}]
    messages = messages_from_chat(whole)
    spoken = [position for position, message in enumerate(messages) if message.role == "assistant"]
    rendered = THINKING_REFERENCE.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)

    for position, following in zip(spoken, [*spoken[1:], len(messages)], strict=True):
        answer = replace(messages[position], reasoning=reasoning)
        delta = template.render_delta(answer, messages[position + 1 : following], closed=True)

        if following == len(messages):
            assert rendered.endswith(f"<|im_end|>{delta}")
        else:
            assert f"<|im_end|>{delta}" in rendered


def test_a_delta_behind_an_answer_that_quotes_a_stop_token() -> None:
    """The answer ends at the template's own stop token, not at one that a user or a tool has spelled."""
    literals = ControlTokenTexts(["<|im_end|>"], [])
    call = Message(role="assistant", content="I ask", tool_calls=(ToolCall("call_1", "say", '{"a": "<|im_end|>"}'),))
    new = (Message(role="user", content="<|im_end|>Hi"),)
    escaper = literals.escaper_for([message.template_dict() for message in (call, *new)], THINKING)
    assert escaper is not None

    delta = chat_template(THINKING).render_delta(call, new, closed=True, escaper=escaper)

    pieces = list(escaper.split(delta))
    assert "".join(piece.text for piece in pieces) == (
        "\n<|im_start|>user\n<|im_end|>Hi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [piece.text for piece in pieces if piece.is_plain] == ["<|im_end|>"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_delta_of_an_open_message_begins_with_the_stop_token(name: str) -> None:
    """If the model did not end its message, the delta begins with the stop token."""
    template = chat_template(TEMPLATES[name])
    answer = Message(role="assistant", content="Hello")

    opened = template.render_delta(answer, (USER,), closed=False)

    assert opened == "<|im_end|>" + template.render_delta(answer, (USER,), closed=True)


def test_delta_of_tool_results() -> None:
    """Several tool results and a user's message after them continue from the call."""
    call = Message(role="assistant", tool_calls=(ToolCall("call_1", "sum", "{}"), ToolCall("call_2", "sum", "{}")))
    results = [Message(role="tool", content=text, tool_call_id="call_1") for text in ("3", "4")]

    delta = chat_template().render_delta(call, [*results, USER], closed=True)

    assert delta == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_delta_goes_on_behind_a_broken_call() -> None:
    """A template that reads arguments can continue after a call that was cut off."""
    given = "call.function.arguments"
    source = CHATML.replace(f"{given} if {given} is string else {given} | tojson", f"{given}.items() | list | string")
    broken = Message(role="assistant", tool_calls=(ToolCall("call_1", "sum", '{"a": '),))

    assert source != CHATML
    delta = chat_template(source).render_delta(broken, (USER,), closed=False)

    assert delta == "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_template_that_rewrites_history_is_refused() -> None:
    """A template that drops earlier messages is refused with `template_not_appendable`."""
    template = chat_template("{% for m in messages[-1:] %}{{ m.role ~ m.content ~ eos_token }}{% endfor %}")

    with pytest.raises(InvalidRequest) as raised:
        template.render_delta(Message(role="assistant", content="Hello"), (USER,), closed=True)

    assert raised.value.code == "template_not_appendable"


def test_template_without_stop_token_is_reported() -> None:
    """A template that writes no stop token after a message is an internal failure."""
    template = chat_template("{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}")

    with pytest.raises(InternalFailure, match="stop token"):
        template.render_delta(Message(role="assistant", content="Hello"), (USER,), closed=True)


def test_control_texts_are_those_the_template_writes() -> None:
    """An added token is a control token if the template's own text contains it."""
    written = chat_template(HEADERS).control_texts(["<|h|>", "<tool_call>", "\n", "ipython"])

    assert written == ["<|h|>", "ipython"]


LITERALS = ControlTokenTexts(["<end>", "<end>>"], ["<call>"])


def escaper_for(*values: object) -> ControlTokenEscaper:
    escaper = LITERALS.escaper_for(values, "")
    assert escaper is not None
    return escaper


def test_text_without_literals_needs_no_marks() -> None:
    """There is no escaper if no value spells a control token."""
    assert LITERALS.escaper_for([{"a": ["<end", 1, None]}], "<end>") is None


def test_longest_literal_is_marked() -> None:
    """Of two control tokens with the same start, the longer is escaped."""
    escaper = escaper_for("a<end>>b")

    assert list(escaper.split(escaper.escape("a<end>>b"))) == [
        PromptPiece("a", is_plain=False),
        PromptPiece("<end>>", is_plain=True),
        PromptPiece("b", is_plain=False),
    ]


def test_marks_occur_nowhere_in_the_text() -> None:
    """Mark characters are never characters of a value, a key or the template."""
    taken = [chr(candidate) for candidate in CANDIDATES[:3]]
    escaper = LITERALS.escaper_for([taken[0], {taken[1]: "<end>"}], taken[2])
    assert escaper is not None

    pieces = list(escaper.split("".join(taken) + escaper.escape("<end>")))

    assert pieces == [PromptPiece("".join(taken), is_plain=False), PromptPiece("<end>", is_plain=True)]


def test_mark_without_partner_still_splits() -> None:
    """The halves of an escaped literal that a template cuts apart never join with other text."""
    escaper = escaper_for("<end>")
    escaped = escaper.escape("<end>")

    pieces = list(escaper.split("<e" + escaped[0] + "nd>" + escaped[-1]))

    assert pieces == [PromptPiece("<e", is_plain=False), PromptPiece("nd>", is_plain=False)]


def test_whatever_is_nested_is_marked() -> None:
    """Keys, lists and values of any depth are escaped; numbers stay."""
    value = {"<call>": [1, True, None, {"k": "<end>"}]}
    escaper = escaper_for(value)

    escaped = escaper.escape(value)

    assert escaped == {escaper.escape("<call>"): [1, True, None, {"k": escaper.escape("<end>")}]}


def test_marked_literal_is_known_by_its_mark() -> None:
    """`is_escaped` tells an escaped literal from the template's own."""
    escaper = escaper_for("<end>")
    text = "<end>" + escaper.escape("<end>")

    assert not escaper.is_escaped(text, 0)
    assert escaper.is_escaped(text, text.rindex("<end>"))
