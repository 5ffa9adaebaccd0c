"""What the demo's people ask: requests about words that the model has never seen, with the calls they need.

Fixed by a seed, so that every run asks the same.
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
    """One thing a person says, and the tool that answers it."""

    text: str
    tool: str | None = None


def schemas_for(job: str) -> list[dict[str, Any]]:
    return list((HELPDESK_TOOLS if job == "helpdesk" else TOOLS).values())


def asks_for(job: str) -> list[Ask]:
    """A session's requests, each of which needs one call."""
    return [ask_for(tool, seed=job) for tool in TOOLS_BY_JOB[job]]


def ask_for(tool: str, seed: str) -> Ask:
    random = Random(f"{seed} {tool}")
    words = Lexicon(random, held_out=True)
    return Ask(random.choice(REQUESTS[tool]).format(**draw_arguments(tool, words)), tool)


def expected_answer(job: str, tool: str, arguments: dict[str, Any], result: dict[str, Any]) -> str:
    """What this job's adapter was trained to say of a result."""
    return VOICES[job].answer(tool, arguments, result)
