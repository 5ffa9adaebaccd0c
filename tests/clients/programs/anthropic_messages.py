"""The `anthropic` package: a loop that runs tools. Mode: plain, streamed, or runner for the package's own loop."""

import sys
from typing import Any

import anthropic
from weather import MODEL, PARAMETERS, QUESTIONS, Report

mode = sys.argv[1]
client, report = anthropic.Anthropic(), Report()
messages: list[Any] = []
tool: Any = {"name": "get_weather", "description": "The weather now.", "input_schema": PARAMETERS}
request: dict[str, Any] = {"model": MODEL, "max_tokens": 1024}


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """The weather now.

    Args:
        city: Where.
    """
    return report.get_weather(city)


def answer() -> Any:
    """The message that answers the messages so far."""
    if mode == "plain":
        return client.messages.create(messages=messages, tools=[tool], **request)
    with client.messages.stream(messages=messages, tools=[tool], **request) as stream:
        return stream.get_final_message()


def run_tools(message: Any) -> list[Any]:
    """The results of all calls in a message."""
    calls = (block for block in message.content if block.type == "tool_use")
    return [
        {"type": "tool_result", "tool_use_id": call.id, "content": report.get_weather(**call.input)} for call in calls
    ]


def loop() -> Any:
    """Answers, runs tools, and answers again until no tool is called."""
    while True:
        message = answer()
        report.count(message.usage)
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return message
        messages.append({"role": "user", "content": run_tools(message)})


def tool_runner() -> Any:
    """The same by the package's own loop."""
    message: Any = None
    runner = client.beta.messages.tool_runner(messages=list(messages), tools=[get_weather], **request)
    for message in runner:
        report.count(message.usage)
        messages.append({"role": "assistant", "content": message.content})
        if (results := runner.generate_tool_call_response()) is not None:
            messages.append(results)
    return message


for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    final = tool_runner() if mode == "runner" else loop()
    report.answers.append(final.content[-1].text)
report.print()
