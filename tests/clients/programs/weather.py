"""What the programs of all clients share: the questions, the tool, and the report that they print."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MODEL = os.environ["GRAFTWORK_MODEL"]
QUESTIONS = ("What is the weather in Paris?", "And in Oslo?")
RESULTS = {"Paris": "20 degrees in Paris", "Oslo": "5 degrees in Oslo"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where."}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass
class Report:
    """What the client saw: its tool's calls, the final text of each turn, and the usage of each request."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    answers: list[str | None] = field(default_factory=list)
    usage: list[tuple[int, int]] = field(default_factory=list)
    """The prompt and completion tokens of each request; or one sum of all, where the client shows no more."""

    def get_weather(self, city: str) -> str:
        """The tool."""
        self.calls.append({"city": city})
        return RESULTS[city]

    def count(self, usage: Any) -> None:
        """Adds the usage of one request, in the words of Chat Completions or of the other interfaces."""
        if hasattr(usage, "prompt_tokens"):
            self.usage.append((usage.prompt_tokens, usage.completion_tokens))
        else:
            self.usage.append((usage.input_tokens, usage.output_tokens))

    def print(self, **more: Any) -> None:
        """Prints the report as the program's last line."""
        print(json.dumps({"calls": self.calls, "answers": self.answers, "usage": self.usage, **more}))


def chat(messages: list[Any], answer: Callable[[], Any], report: Report) -> None:
    """Asks all questions on Chat Completions, and runs the tools that the answers call, as OpenAI's guide writes it.

    `answer` returns the message that answers `messages` so far. Adds all messages to `messages`.
    """
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while (message := answer()).tool_calls:
            messages.append(message)
            for call in message.tool_calls:
                result = report.get_weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        messages.append(message)
        report.answers.append(message.content)
