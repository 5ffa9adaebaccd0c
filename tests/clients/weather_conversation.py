"""The conversation that most clients have: two questions, each answered with the help of a tool."""

from typing import Any

from tests.clients.scripted_gateway import Reply, ScriptedGateway, ScriptedModel, tool_call

TOOL = "get_weather"
PARIS, OSLO = "What is the weather in Paris?", "And in Oslo?"
PARIS_RESULT, OSLO_RESULT = "20 degrees in Paris", "5 degrees in Oslo"
PARIS_ANSWER, OSLO_ANSWER = "Paris is warm now.", "Oslo is colder than Paris."
REPLIES = (
    Reply(OSLO_RESULT, OSLO_ANSWER),
    Reply(OSLO, tool_call(TOOL, '{"city": "Oslo"}'), needs=(TOOL,)),
    Reply(PARIS_RESULT, PARIS_ANSWER),
    Reply(PARIS, tool_call(TOOL, '{"city": "Paris"}'), needs=(TOOL,)),
)


def assert_two_turns(gateway: ScriptedGateway, seen: dict[str, Any], *, has_usage: bool = True) -> None:
    """Checks what a client saw of the conversation, and what the model saw of the client."""
    model = gateway.model
    assert seen["calls"] == [{"city": "Paris"}, {"city": "Oslo"}]
    assert seen["answers"] == [PARIS_ANSWER, OSLO_ANSWER]
    assert_whole_history(model)
    if has_usage:
        counted = [[exchange.prompt_tokens, exchange.completion_tokens] for exchange in model.exchanges]
        assert seen["usage"] == counted


def assert_whole_history(model: ScriptedModel) -> None:
    """Checks that each of the four prompts contains, in order, all that was said before it."""
    said = (PARIS, '"city": "Paris"', PARIS_RESULT, PARIS_ANSWER, OSLO, '"city": "Oslo"', OSLO_RESULT)
    lengths = (1, 3, 5, 7)

    assert len(model.exchanges) == len(lengths)
    for exchange, length in zip(model.exchanges, lengths, strict=True):
        conversation = exchange.prompt[exchange.prompt.index(PARIS) :]
        places = [conversation.find(text) for text in said[:length]]
        assert -1 not in places
        assert places == sorted(places)
