"""The `openai` package on Responses: history sent by the client or kept by the server, plain or streamed."""

import json
import sys
from typing import Any

from openai import OpenAI
from weather import MODEL, PARAMETERS, QUESTIONS, Report

history, mode = sys.argv[1:]
client, report = OpenAI(), Report()
tool: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather now.",
    "parameters": PARAMETERS,
    "strict": True,
}
past: list[Any] = []
previous: dict[str, str] = {}


def answer(items: list[Any]) -> Any:
    """The response to new items, after all earlier ones."""
    if history == "sent":
        past.extend(items)
        items = past
    request: dict[str, Any] = {"model": MODEL, "input": items, "tools": [tool], **previous}
    if mode == "plain":
        response = client.responses.create(**request)
    else:
        with client.responses.stream(**request) as stream:
            response = stream.get_final_response()
    report.count(response.usage)
    if history == "sent":
        past.extend(response.output)
    else:
        previous["previous_response_id"] = response.id
    return response


def run(call: Any) -> Any:
    """The item with a call's result."""
    result = report.get_weather(**json.loads(call.arguments))
    return {"type": "function_call_output", "call_id": call.call_id, "output": result}


for question in QUESTIONS:
    response = answer([{"role": "user", "content": question}])
    while calls := [item for item in response.output if item.type == "function_call"]:
        response = answer([run(call) for call in calls])
    report.answers.append(response.output_text)
report.print()
