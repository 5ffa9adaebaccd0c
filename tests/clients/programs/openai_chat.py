"""The `openai` package on Chat Completions: a loop that runs tools. Mode: plain or streamed."""

import sys
from typing import Any

from openai import OpenAI
from weather import MODEL, PARAMETERS, Report, chat

client, report = OpenAI(), Report()
messages: list[Any] = []
function = {"name": "get_weather", "description": "The weather now.", "parameters": PARAMETERS, "strict": True}
request: dict[str, Any] = {"model": MODEL, "tools": [{"type": "function", "function": function}]}


def answer() -> Any:
    """The message that answers the messages so far."""
    if sys.argv[1] == "plain":
        completion = client.chat.completions.create(messages=messages, **request)
        report.count(completion.usage)
        return completion.choices[0].message
    options = {"include_usage": True}
    with client.chat.completions.stream(messages=messages, stream_options=options, **request) as stream:
        final = stream.get_final_completion()
    report.count(final.usage)
    return final.choices[0].message


chat(messages, answer, report)
report.print()
