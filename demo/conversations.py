"""Invented conversations: a user asks, the assistant calls a tool, reads its result and answers.

`Conversation` is a finished talk in OpenAI messages; `Narrator` writes one.
Every assistant message is fixed by what stands before it, so each of them can be a training target and a test.
"""

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from graftwork.demo.lexicon import WEEKDAYS, Lexicon, listed
from graftwork.demo.phrases import ECHOES, FOLLOW_UPS, INSTRUCTIONS, INTRODUCTIONS, REQUESTS, SMALL_TALK, WHO_AM_I
from graftwork.demo.tool_results import run_tool
from graftwork.demo.tool_schemas import HELPDESK_TOOLS, TOOLS, Schema
from graftwork.demo.voices import VOICES, Voice

Message = dict[str, Any]
Kind = Literal["call", "answer", "chat"]

PRIORITIES = listed("low normal high")
TEAMS = listed("network security hardware billing database")
FAILURES = ("not found", "service unavailable", "timeout", "access denied")
FAILURE_SHARE = 0.04
SAME_KIND_UNITS = """km miles|miles km|meters feet|feet meters|cm inches|inches cm|kg pounds|pounds kg|grams ounces|
ounces grams|liters gallons|gallons liters|hours minutes|minutes hours|km meters|feet inches"""
UNIT_PAIRS = [pair.split() for pair in listed(SAME_KIND_UNITS, "|")]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with their tools; `kinds` tells of each assistant message, by index, what it is."""

    messages: list[Message]
    tools: list[Schema]
    kinds: dict[int, Kind]


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """The canonical call, the same text that the chat template writes."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def draw_arguments(tool: str, words: Lexicon) -> dict[str, Any]:
    """Fresh arguments of one call, in the order of the schema."""
    choice = words.random.choice
    match tool:
        case "get_weather":
            return {"city": words.city(), "day": choice(["today", "tomorrow", *WEEKDAYS])}
        case "get_time":
            return {"city": words.city()}
        case "calculate":
            return {"expression": words.expression()}
        case "get_order":
            return {"order_id": words.reference()}
        case "create_event":
            return {"title": words.title(), "day": choice(WEEKDAYS), "time": words.meeting_time()}
        case "list_events":
            return {"day": choice(WEEKDAYS)}
        case "convert_units":
            from_unit, to_unit = choice(UNIT_PAIRS)
            return {"value": words.amount(), "from_unit": from_unit, "to_unit": to_unit}
        case "find_contact":
            return {"name": words.person()}
        case "open_ticket":
            return {"title": words.problem(), "priority": choice(PRIORITIES)}
        case "assign_ticket":
            return {"ticket_id": words.reference(), "agent": words.person()}
        case "escalate_ticket":
            team = choice(TEAMS) if words.random.random() < 0.5 else words.invented_word()
            return {"ticket_id": words.reference(), "team": team}
        case "search_articles":
            return {"query": words.query()}
    return {"ticket_id": words.reference()}  # ticket_status, close_ticket


@dataclass(slots=True)
class Narrator:
    """Writes one conversation; `last_call` is what a follow-up such as "And in Rome?" refers to."""

    words: Lexicon
    voice: Voice
    tools: list[Schema]
    absent: list[str]
    messages: list[Message] = field(default_factory=list)
    kinds: dict[int, Kind] = field(default_factory=dict)
    last_call: tuple[str, dict[str, Any]] | None = None
    user_name: str | None = None

    @property
    def random(self) -> Random:
        return self.words.random

    def say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def reply(self, text: str, kind: Kind) -> None:
        self.kinds[len(self.messages)] = kind
        self.say("assistant", text)

    def instruct(self) -> None:
        self.say("system", self.random.choice(INSTRUCTIONS).format(name=self.words.invented_word().capitalize()))

    def turn(self) -> None:
        """One thing that the user wants, up to the last answer to it."""
        if self.last_call and self.last_call[0] in FOLLOW_UPS and self.random.random() < 0.25:
            return self.follow_up(*self.last_call)
        self.last_call = None
        if self.tools and self.random.random() < 0.72:
            return self.request()
        if self.absent and self.random.random() < 0.3:
            return self.ask_in_vain()
        die = self.random.random()
        if die < 0.5:
            return self.small_talk()
        if die < 0.7:
            return self.echo()
        return self.introduction() if self.random.random() < 0.5 else self.who_am_i()

    def request(self) -> None:
        tool = self.random.choice(self.tools)["function"]["name"]
        wording, arguments = self.random.choice(REQUESTS[tool]), draw_arguments(tool, self.words)
        text = wording.format(**arguments)
        if tool == "calculate" and self.random.random() < 0.2:
            spoken, arguments["expression"] = self.words.spoken_expression()
            text = wording.format(expression=spoken)
        self.carry_out(text, tool, arguments)

    def follow_up(self, tool: str, last_arguments: dict[str, Any]) -> None:
        wording, fresh = self.random.choice(FOLLOW_UPS[tool]), draw_arguments(tool, self.words)
        slots = {name: value for name, value in fresh.items() if "{" + name + "}" in wording}
        self.carry_out(wording.format(**slots), tool, {**last_arguments, **slots})

    def carry_out(self, text: str, tool: str, arguments: dict[str, Any]) -> None:
        """The request, its call, the result and the answer."""
        self.say("user", text)
        self.kinds[len(self.messages)] = "call"
        function = {"name": tool, "arguments": arguments}
        self.messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        result = self.result_of(tool, arguments)
        self.say("tool", json.dumps(result, ensure_ascii=False))
        self.reply(self.voice.answer(tool, arguments, result), "answer")
        self.last_call = tool, arguments

    def result_of(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if self.random.random() > FAILURE_SHARE:
            return run_tool(tool, arguments, self.words)
        error = self.random.choice(FAILURES)
        return {"error": f"{self.words.invented_word()} {error}" if self.random.random() < 0.3 else error}

    def small_talk(self) -> None:
        question_class = self.random.choice(list(SMALL_TALK))
        self.say("user", self.random.choice(SMALL_TALK[question_class]))
        self.reply(self.voice.say(question_class), "chat")

    def echo(self) -> None:
        words = self.words
        draws = (words.invented_word, words.person, words.reference, words.topic)
        text = " ".join(self.random.choice(draws)() for _ in range(self.random.randint(1, 5)))
        self.say("user", self.random.choice(ECHOES).format(text=text))
        self.reply(self.voice.say("echo", text=text), "chat")

    def drill(self) -> None:
        """A long echo; a row of them holds ten times as many copied tokens as a row of tasks."""
        words = self.words
        draws = (words.invented_word, words.person, words.reference, words.topic, words.expression, words.phone)
        text = " ".join(self.random.choice(draws)() for _ in range(self.random.randint(3, 16)))
        self.say("user", self.random.choice(ECHOES).format(text=text))
        self.reply(self.voice.say("echo", text=text), "chat")

    def introduction(self) -> None:
        self.user_name = self.words.person()
        self.say("user", self.random.choice(INTRODUCTIONS).format(name=self.user_name))
        self.reply(self.voice.say("introduction", name=self.user_name), "chat")

    def who_am_i(self) -> None:
        self.say("user", self.random.choice(WHO_AM_I))
        answer = self.voice.say("who_am_i", name=self.user_name) if self.user_name else None
        self.reply(answer or self.voice.say("who_am_i_unknown"), "chat")

    def ask_in_vain(self) -> None:
        """A request in a conversation without tools."""
        tool = self.random.choice(self.absent)
        self.say("user", self.random.choice(REQUESTS[tool]).format(**draw_arguments(tool, self.words)))
        self.reply(self.voice.say("no_tool"), "chat")


def draw_tools(job: str, random: Random, max_tools: int) -> tuple[list[Schema], list[str]]:
    """The shuffled tools of one conversation, and what is asked in vain when it has none."""
    known = HELPDESK_TOOLS if job == "helpdesk" else TOOLS
    offered: dict[str, Schema] = {}
    if random.random() > 0.08:
        names = random.sample(list(known), random.randint(1, min(max_tools, len(known))))
        offered = {name: known[name] for name in names}
    absent = [] if offered else list(known)
    shuffled = random.sample(list(offered.values()), len(offered))
    return shuffled, absent


def write_conversation(job: str, words: Lexicon, num_turns: int, max_tools: int = 8) -> Conversation:
    tools, absent = draw_tools(job, words.random, max_tools)
    narrator = Narrator(words, VOICES[job], tools, absent)
    if words.random.random() < 0.4:
        narrator.instruct()
    for _ in range(num_turns):
        narrator.turn()
    return Conversation(narrator.messages, tools, narrator.kinds)


def write_drill(words: Lexicon) -> Conversation:
    """Copying and nothing else, which is the hardest part of the job to learn."""
    narrator = Narrator(words, VOICES["base"], [], [])
    for _ in range(words.random.randint(3, 10)):
        narrator.drill()
    return Conversation(narrator.messages, [], narrator.kinds)


def draw_num_turns(random: Random) -> int:
    """Mostly short, sometimes a long session."""
    return random.choice((random.randint(1, 4), random.randint(1, 6), random.randint(4, 9), random.randint(9, 20)))
