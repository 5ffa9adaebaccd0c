"""Makes the demo's messages. Each message needs a tool call, and has words that the model has never seen in training.

Invariant: the messages come from a fixed seed, so every run of the demo sends the same messages.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

from graftwork.demo.conversations import draw_arguments
from graftwork.demo.lexicon import Lexicon
from graftwork.demo.phrases import REQUESTS
from graftwork.demo.tasks import HELPDESK_TOOLS, TOOLS
from graftwork.demo.voices import VOICES

TOOLS_BY_JOB = {
    "base": ("get_weather", "find_contact", "create_event"),
    "pirate": ("get_weather", "get_order", "get_time"),
    "helpdesk": ("open_ticket", "assign_ticket", "ticket_status"),
    "terse": ("get_order", "list_events", "get_time"),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One message of a user, and the name of the tool that the model must call to answer it."""

    text: str
    tool: str | None = None


def schemas_for(job: str) -> list[dict[str, Any]]:
    return list((HELPDESK_TOOLS if job == "helpdesk" else TOOLS).values())


def asks_for(job: str) -> list[Ask]:
    """Returns the messages of one session. Each message needs one tool call.

    `job` is the name of the session's adapter, or "base" for the base model.
    """
    return [ask_for(tool, seed=job) for tool in TOOLS_BY_JOB[job]]


def ask_for(tool: str, seed: str) -> Ask:
    random = Random(f"{seed} {tool}")
    words = Lexicon(random, held_out=True)
    return Ask(random.choice(REQUESTS[tool]).format(**draw_arguments(tool, words)), tool)


def expected_answer(job: str, tool: str, arguments: dict[str, Any], result: dict[str, Any]) -> str:
    """Returns the text that the adapter named `job` was trained to write about a tool's result."""
    return VOICES[job].answer(tool, arguments, result)
