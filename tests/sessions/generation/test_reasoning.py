"""Tests of the split of answers into reasoning and the answer itself."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.events import CacheReport, FinishReason, TokenLogprobs
from graftwork.engine.core.requests import ReasoningRule
from graftwork.platform.errors import InvalidRequest, ValidationFailed
from graftwork.sessions.generation.events import ReasoningDelta, TextDelta, ToolCallFinished
from graftwork.sessions.generation.output_parser import OutputParser, OutputRules
from graftwork.sessions.generation.reasoning import (
    NO_REASONING,
    REASONING_FORMATS,
    ReasoningAsk,
    ReasoningModel,
    ReasoningPiece,
    ReasoningSplitter,
    plan_reasoning,
    reasoning_format,
)
from graftwork.sessions.text.messages import Message
from graftwork.sessions.tools.formats import HERMES
from tests.hypothesis_profiles import examples
from tests.sessions.tokenizer_and_templates import CHATML, THINKING, chat_template, text_tokenizer, token_id

THINK = REASONING_FORMATS["think"]
MODEL = ReasoningModel.of(THINK, text_tokenizer(), chat_template(THINKING).variables())
pieces = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "\n", "\n\n", " ", "a", "é", "<"]), max_size=9
)


def expected(text: str, *, is_open: bool) -> ReasoningPiece:
    """The two parts of a whole text, by a regular expression."""
    found = re.fullmatch(r"\s*<think>(.*)", text, re.DOTALL)
    inside = text if is_open else found.group(1) if found else None
    if inside is None:
        return ReasoningPiece("", text)
    reasoning, tag, answer = inside.partition("</think>")
    return ReasoningPiece(reasoning.strip("\n") if tag else reasoning.lstrip("\n"), answer.lstrip("\n"))


@settings(max_examples=examples(300))
@given(cut=pieces, is_open=st.booleans())
def test_a_text_splits_alike_however_it_is_cut(cut: list[str], is_open: bool) -> None:
    """The parts of a text that comes in pieces are those of the whole text."""
    splitter = ReasoningSplitter(THINK, is_open=is_open)

    read = [*map(splitter.push, cut), splitter.flush()]

    joined = ReasoningPiece(*map("".join, zip(*read, strict=True)))
    whole = expected("".join(cut), is_open=is_open)
    assert joined.answer == whole.answer
    assert joined.reasoning.rstrip("\n") == whole.reasoning.rstrip("\n")  # line breaks at the end are never sent


def answer(text: str, **rules: object) -> tuple[list[object], OutputParser]:
    """The events of an answer, token by token."""
    parser = OutputParser(text_tokenizer(), OutputRules(reasoning=THINK, **rules))  # type: ignore[arg-type]
    token_ids = text_tokenizer().encode(text, allow_special=True)
    scores = [TokenLogprobs(-0.5, (), 1) for _ in token_ids]
    return [*parser.push(token_ids, scores), *parser.finish()], parser


def test_a_call_behind_reasoning_is_a_call() -> None:
    """Calls and stop strings are read in the answer, and never in the reasoning."""
    thought = 'I say STOP, or <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    called = '<tool_call>\n{"name": "g", "arguments": {"a": 1}}\n</tool_call>'

    events, parser = answer(f"<think>\n{thought}\n</think>\n\n{called}", tool_calls=HERMES, stop=("STOP",))
    finished = parser.finished(FinishReason.STOP, CacheReport())

    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == thought
    assert [event.name for event in events if isinstance(event, ToolCallFinished)] == ["g"]
    assert (finished.reasoning, finished.text, finished.reason) == (thought, "", "tool_calls")


def test_a_stop_string_ends_the_answer_behind_the_reasoning() -> None:
    """The stop string in the answer ends it."""
    events, parser = answer("<think>STOP</think>Hello STOP you", stop=("STOP",))

    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "STOP"
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "Hello "
    assert parser.is_over


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("ending", ["</think>\n\nYes", ""], ids=["closed", "cut"])
def test_tokens_of_reasoning_are_counted_without_the_tags(is_open: bool, ending: str) -> None:
    """The count is that of the tokens between the tags, also for reasoning that was cut off."""
    thought = "\nLet me look.\nWhat is the time"
    _, parser = answer(("" if is_open else "<think>") + thought + ending, is_reasoning=is_open)

    assert parser.reasoning_tokens == len(text_tokenizer().encode(thought, allow_special=False))


def test_log_probabilities_are_those_of_the_answer() -> None:
    """A whole answer and a streamed one have an entry for each token behind the reasoning, and for no other."""
    events, parser = answer("<think>time</think>What is the time", with_logprobs=True)
    finished = parser.finished(FinishReason.STOP, CacheReport())

    told = text_tokenizer().encode("What is the time", allow_special=False)
    assert [score.token.token_id for score in finished.logprobs or ()] == list(told)
    streamed = [score.token.token_id for event in events if isinstance(event, TextDelta) for score in event.logprobs]
    assert streamed == list(told)


def test_an_answer_that_only_begins_like_a_tag_keeps_its_log_probabilities() -> None:
    """Tokens that could have been a tag belong to the answer once they are not."""
    parser = OutputParser(text_tokenizer(), OutputRules(reasoning=THINK, with_logprobs=True))
    token_ids = [
        *text_tokenizer().encode("<th", allow_special=False),
        *text_tokenizer().encode("at", allow_special=False),
    ]
    events = [*parser.push(token_ids, [TokenLogprobs(-0.5, (), 1)] * len(token_ids)), *parser.finish()]

    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "<that"
    finished = parser.finished(FinishReason.STOP, CacheReport())
    assert [score.token.token_id for score in finished.logprobs or ()] == token_ids


def test_tags_are_found_in_the_chat_template() -> None:
    """A template with both tags is one of a model that reasons; a setting can choose others or none."""
    assert reasoning_format(CHATML) is None
    assert reasoning_format(None) is None
    assert reasoning_format(THINKING) == THINK
    assert reasoning_format(THINKING, "none") is None
    assert reasoning_format(CHATML, "mistral") == REASONING_FORMATS["mistral"]
    with pytest.raises(ValidationFailed, match="think"):
        reasoning_format(THINKING, "harmony")


@pytest.mark.parametrize(
    ("variables", "is_open"), [({}, False), ({"opens_thinking": True}, True), ({"enable_thinking": False}, False)]
)
def test_the_prompt_tells_whether_the_reasoning_is_open(variables: dict[str, bool], is_open: bool) -> None:
    """The rule for the engine has the tags' tokens, and whether the prompt ends behind the opening tag."""
    text = chat_template(THINKING).render((Message(role="user", content="Hi"),), variables=variables)
    prompt = text_tokenizer().encode(text, allow_special=True)

    plan = plan_reasoning(MODEL, ReasoningAsk(budget=3), text_tokenizer(), prompt, has_grammar=False)

    breaks = tuple(
        ids[0]
        for ids in (text_tokenizer().encode(text, allow_special=False) for text in ("\n", "\n\n"))
        if len(ids) == 1
    )
    assert plan.rule == ReasoningRule(token_id("<think>"), token_id("</think>"), is_open, 3, breaks)
    assert (plan.form, plan.is_open) == (THINK, is_open)


def test_a_budget_that_cannot_be_kept_is_refused() -> None:
    """A model without reasoning, or without tokens for its tags, has no budget; a grammar then holds the whole answer."""
    wordy = ReasoningModel.of(REASONING_FORMATS["mistral"], text_tokenizer(), frozenset())
    for model in (None, wordy):
        with pytest.raises(InvalidRequest) as raised:
            plan_reasoning(model, ReasoningAsk(budget=0), text_tokenizer(), (1,), has_grammar=False)
        assert raised.value.param == "thinking_token_budget"
        assert plan_reasoning(model, ReasoningAsk(), text_tokenizer(), (1,), has_grammar=True) == NO_REASONING


def test_an_effort_reaches_the_template_that_reads_it() -> None:
    """An effort sets those names alone that the template reads; `none` turns the reasoning off."""
    assert MODEL.template_variables(None) == {}
    assert MODEL.template_variables("low") == {}
    assert MODEL.template_variables("none") == {"enable_thinking": False}
    both = ReasoningModel(THINK, None, None, variables=frozenset({"reasoning_effort", "thinking"}))
    assert both.template_variables("none") == {"reasoning_effort": "none", "thinking": False}
