"""What the programs of all clients share: the questions, the tool, and the report that they print."""

import json
import os
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
