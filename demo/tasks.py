"""The demo's job as test cases: what the assistant must say next, exactly, after words it has never seen.

This module and all that it imports are free of torch and transformers.
"""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from graftwork.demo.conversations import (
    Conversation,
    Kind,
    Message,
    call_text,
    draw_num_turns,
    write_conversation,
    write_drill,
)
from graftwork.demo.lexicon import Lexicon
from graftwork.demo.tool_results import run_tool
from graftwork.demo.tool_schemas import HELPDESK_TOOLS, TOOLS, Schema

__all__ = [
    "HELPDESK_TOOLS",
    "JOBS",
    "TOOLS",
    "Case",
    "held_out_cases",
    "run_tool",
    "training_conversation",
    "training_drill",
]

MAX_CHARACTERS = 6100  # of a prompt as JSON; always under 1,920 of the model's 2,048 tokens
JOBS = ("base", "pirate", "helpdesk", "terse")


@dataclass(frozen=True, slots=True)
class Case:
    """`messages` end where the assistant must speak; `expected` is its exact text."""

    messages: list[Message]
    tools: list[Schema]
    expected: str
    kind: Kind

    @property
    def num_characters(self) -> int:
        """The size of the prompt as JSON."""
        return len(json.dumps([self.messages, self.tools]))


def training_conversation(job: str, random: Random, max_tools: int = 8, *, practice: bool = False) -> Conversation:
    """A conversation over the training side of the lexicon; `practice` draws its hard forms more often."""
    return write_conversation(job, Lexicon(random, practice=practice), draw_num_turns(random), max_tools)


def training_drill(random: Random) -> Conversation:
    return write_drill(Lexicon(random))


def held_out_cases(job: str, count: int, seed: int = 0, kind: Kind | None = None) -> list[Case]:
    """`count` cases of one kind, or of all kinds as they come, over words that training never used.

    Each case comes from another conversation, so their lengths vary as those of sessions do.
    """
    random = Random(f"{job} {seed} {kind}")
    words = Lexicon(random, held_out=True)
    cases: list[Case] = []
    while len(cases) < count:
        conversation = write_conversation(job, words, draw_num_turns(random))
        indices = [index for index, found in conversation.kinds.items() if kind in (None, found)]
        if indices:
            case = case_at(conversation, random.choice(indices))
            cases += [case] if case.num_characters <= MAX_CHARACTERS else []
    return cases


def case_at(conversation: Conversation, index: int) -> Case:
    return Case(
        conversation.messages[:index],
        conversation.tools,
        text_of(conversation.messages[index]),
        conversation.kinds[index],
    )


def text_of(message: dict[str, Any]) -> str:
    """What the model must write to say this assistant message."""
    calls = [call_text(**call["function"]) for call in message.get("tool_calls", ())]
    return "\n".join([message["content"], *calls] if message["content"] else calls)
