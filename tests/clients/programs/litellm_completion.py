"""litellm, by OpenAI's or Anthropic's interface of the server. Mode: plain or streamed."""

import json
import sys
from typing import Any

import litellm
from weather import MODEL, PARAMETERS, QUESTIONS, Report

provider, mode = sys.argv[1:]
report = Report()
messages: list[Any] = []
function = {"name": "get_weather", "description": "The weather now.", "parameters": PARAMETERS}
request: dict[str, Any] = {"model": f"{provider}/{MODEL}", "tools": [{"type": "function", "function": function}]}


def answer() -> Any:
    """The message that answers the messages so far."""
    if mode == "plain":
        completion = litellm.completion(messages=messages, **request)
    else:
        options = {"include_usage": True}
        chunks = list(litellm.completion(messages=messages, stream=True, stream_options=options, **request))
        completion = litellm.stream_chunk_builder(chunks, messages=messages)
    report.count(completion.usage)
    return completion.choices[0].message


for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    while (message := answer()).tool_calls:
        messages.append(message)
        for call in message.tool_calls:
            result = report.get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    messages.append(message)
    report.answers.append(message.content)
report.print()
