"""litellm, by OpenAI's or Anthropic's interface of the server. Mode: plain or streamed."""

import sys
from typing import Any

import litellm
from weather import MODEL, PARAMETERS, Report, chat

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


chat(messages, answer, report)
report.print()
