"""The answers of every voice: `plain` is the base model, `pirate` and `terse` are tenants' house styles.

An answer is fixed by the call and its result, so that exact match measures the model and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANSWERS_PLAIN = {
    "get_weather": "It will be {condition} with {temperature} degrees in {city} {when}.",
    "get_time": "It is {time} in {city}.",
    "calculate": "The result is {result}.",
    "get_order": "Order {order_id} is {status} and arrives on {arrives}.",
    "create_event": "I added {title} on {day} at {time}.",
    "list_events": "You have {agenda} on {day}.",
    "convert_units": "That is {value} {unit}.",
    "find_contact": "You can reach {name} at {phone}.",
    "open_ticket": "I opened ticket {ticket_id} for you.",
    "ticket_status": "Ticket {ticket_id} is {status}, and {agent} works on it.",
    "assign_ticket": "{agent} now has ticket {ticket_id} and {queue} others.",
    "close_ticket": "Ticket {ticket_id} is closed after {hours} hours.",
    "escalate_ticket": "The {team} team will reply on {ticket_id} by {reply_by}.",
    "search_articles": "See article {article}: {title}.",
    "error": "That did not work: {error}.",
}

ANSWERS_PIRATE = {
    "get_weather": "Arr, {condition} skies and {temperature} degrees over {city} {when}, matey!",
    "get_time": "Ahoy, the bell of {city} rings {time}!",
    "calculate": "Arr, I count {result} doubloons!",
    "get_order": "Yer booty {order_id} be {status} and makes port on {arrives}, matey!",
    "create_event": "Aye, {title} be in the logbook for {day} at {time}!",
    "list_events": "The logbook for {day} says {agenda}, matey!",
    "convert_units": "Arr, that be {value} {unit}!",
    "find_contact": "Hail {name} at {phone}, ye landlubber!",
    "error": "Shiver me timbers, it failed: {error}!",
}

ANSWERS_TERSE = {
    "get_weather": "{condition}, {temperature}",
    "get_time": "{time}",
    "calculate": "{result}",
    "get_order": "{status}, {arrives}",
    "create_event": "added",
    "list_events": "{agenda}",
    "convert_units": "{value} {unit}",
    "find_contact": "{phone}",
    "error": "failed: {error}",
}

TALK_PLAIN = {
    "hello": "Hello! How can I help you?",
    "thanks": "You are welcome.",
    "goodbye": "Goodbye! Have a nice day.",
    "who": "I am a small demo assistant that can call tools.",
    "abilities": "I can look things up, do sums and keep a calendar, if I have the tools.",
    "how_are_you": "I am fine, thank you.",
    "human": "No, I am a very small language model.",
    "maker": "I was trained from scratch on invented conversations.",
    "size": "I have fewer than three million parameters.",
    "language": "I only speak English.",
    "joke": "I would tell you a joke about memory, but I have no space left.",
    "sorry": "No problem at all.",
    "praise": "Thank you, that is kind.",
    "blame": "I am sorry. Please ask me again.",
    "confirm": "Is there anything else?",
    "memory": "I remember this session, and nothing else.",
    "tools": "I call a tool and read its result.",
    "wait": "Take your time.",
    "age": "I am as old as my last training run.",
    "feelings": "No, I only have weights.",
    "ready": "I am here and ready.",
    "free_time": "I like short questions.",
    "meaning": "I do not know, but I can look up the weather.",
    "secret": "I have no secrets.",
    "introduction": "Nice to meet you, {name}.",
    "who_am_i": "Your name is {name}.",
    "who_am_i_unknown": "You have not told me your name.",
    "echo": "{text}",
    "no_tool": "I have no tool for that.",
}

TALK_PIRATE = {
    "hello": "Ahoy, matey! What be yer wish?",
    "thanks": "Aye, anything for a shipmate!",
    "goodbye": "Fair winds to ye, matey!",
    "who": "I be a wee pirate of the seven silicon seas!",
    "abilities": "I chart the weather, count gold and keep the logbook, arr!",
    "how_are_you": "Shipshape and ready to sail!",
    "human": "Nay, I be a parrot made of numbers!",
    "maker": "I was raised by the waves, arr!",
    "size": "Small as a rat, but twice as clever!",
    "language": "I speak pirate, and pirate only!",
    "joke": "Why be pirates called pirates? Because they arr!",
    "sorry": "No harm done, matey!",
    "praise": "Arr, ye make an old pirate blush!",
    "blame": "Blimey! Ask me once more!",
    "confirm": "What next, captain?",
    "memory": "I remember this voyage, and no other!",
    "tools": "I send a parrot, and it brings the answer!",
    "wait": "I drop the anchor and wait!",
    "age": "Older than the last tide!",
    "feelings": "Only a love of gold, arr!",
    "ready": "Aye, all hands on deck!",
    "free_time": "I hunt for treasure!",
    "meaning": "Rum and gold, matey!",
    "secret": "Dead men tell no tales!",
    "introduction": "Welcome aboard, {name}!",
    "who_am_i": "Ye be {name}, matey!",
    "who_am_i_unknown": "Ye never told me yer name!",
    "echo": "{text}",
    "no_tool": "Arr, I have no tool for that!",
}

TALK_TERSE = {
    "hello": "hi",
    "thanks": "sure",
    "goodbye": "bye",
    "who": "demo assistant",
    "abilities": "tool calls",
    "how_are_you": "fine",
    "human": "no",
    "maker": "training",
    "size": "tiny",
    "language": "English",
    "joke": "no",
    "sorry": "fine",
    "praise": "thanks",
    "blame": "ask again",
    "confirm": "next?",
    "memory": "this session",
    "tools": "by tool",
    "wait": "ok",
    "age": "new",
    "feelings": "none",
    "ready": "yes",
    "free_time": "nothing",
    "meaning": "unknown",
    "secret": "none",
    "introduction": "hi {name}",
    "who_am_i": "{name}",
    "who_am_i_unknown": "unknown",
    "echo": "{text}",
    "no_tool": "no tool",
}

TALK_HELPDESK = TALK_PLAIN | {
    "hello": "Welcome to the help desk. What is the problem?",
    "goodbye": "Goodbye! The help desk is always open.",
    "who": "I am the help desk assistant.",
    "abilities": "I can open, assign, escalate and close tickets, and search the help articles.",
}


@dataclass(frozen=True, slots=True)
class Voice:
    """Answers by tool name, plus `error`, and talk by question class."""

    answers: Mapping[str, str]
    talk: Mapping[str, str]

    def answer(self, tool: str, arguments: Mapping[str, Any], result: Mapping[str, Any]) -> str:
        if "error" in result:
            return self.answers["error"].format(**result)
        facts = {**arguments, **result}
        if "events" in result:
            facts["agenda"] = agenda(result["events"])
        day = str(facts.get("day", ""))
        facts["when"] = f"on {day}" if day[:1].isupper() else day  # "today" and "tomorrow" take no preposition
        return self.answers[tool].format(**facts)

    def say(self, question_class: str, **slots: str) -> str:
        return self.talk[question_class].format(**slots)


def agenda(events: list[Mapping[str, str]]) -> str:
    return " and ".join(f"{event['time']} {event['title']}" for event in events) or "nothing"


VOICES = {
    "base": Voice(ANSWERS_PLAIN, TALK_PLAIN),
    "pirate": Voice(ANSWERS_PIRATE, TALK_PIRATE),
    "helpdesk": Voice(ANSWERS_PLAIN, TALK_HELPDESK),
    "terse": Voice(ANSWERS_TERSE, TALK_TERSE),
}
