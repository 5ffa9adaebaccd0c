"""What the benchmark of speculation serves: talks with the demo model over words that its training never used.

A talk is a session: its turns are served one after the other, each with everything before it as its prefix. What stands
before a turn is the written conversation, not what the model made of it, so that every engine is asked the same.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from graftwork.demo.conversations import Conversation, Kind, call_text, write_conversation, write_drill
from graftwork.demo.lexicon import Lexicon
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.sampling import SamplingParams
from graftwork.platform.clock import SystemClock
from graftwork.platform.ids import IsolationDomain, RequestId, new_id
from graftwork.sessions.text.encoding import PromptEncoder
from graftwork.sessions.text.messages import messages_from_chat
from graftwork.sessions.text.model_files import ModelFolder

DEMO_MODEL = Path(__file__).parents[1] / "demo" / "model"
SETS = ("agent", "chat", "json")
MAX_TOKENS = 112
_LONGEST_PROMPT = 1900
_TURNS = {"agent": (6, 10), "chat": (4, 8), "json": (4, 8)}
_KINDS: dict[str, tuple[Kind, ...]] = {"agent": ("call", "answer", "chat"), "chat": ("chat",), "json": ("call",)}


@dataclass(frozen=True, slots=True)
class TalkTurn:
    """One request of a talk."""

    prompt_token_ids: tuple[int, ...]
    prediction_token_ids: tuple[int, ...]
    """Of an edit: the call that is to be made again with something changed in it."""


Talk = list[TalkTurn]


def talks(name: str, count: int, seed: int) -> list[Talk]:
    """`count` talks of one set; every seed gives others.

    `agent` are long sessions of calls, tool results quoted in the answers, calls made again with other arguments, and
    texts read back; `chat` is small talk without tools, of many who share nothing; `json` are calls alone, most of them the first of their kind.
    """
    random = Random(f"{name} {seed}")
    words = Lexicon(random, held_out=True)
    found: list[Talk] = []
    while len(found) < count:
        talk = list(_turns(_conversation(name, words), _KINDS[name]))
        found += [talk] if len(talk) >= 3 else []
    return found


def _conversation(name: str, words: Lexicon) -> Conversation:
    if name == "agent" and words.random.random() < 0.2:
        return write_drill(words)
    while True:
        conversation = write_conversation("base", words, words.random.randint(*_TURNS[name]))
        if (name == "chat") != bool(conversation.tools):
            return conversation


def _turns(conversation: Conversation, kinds: tuple[Kind, ...]) -> Iterator[TalkTurn]:
    last_call: dict[str, Any] | None = None
    for index, kind in conversation.kinds.items():
        message = conversation.messages[index]
        prompt = _encoder().encode_messages(
            messages_from_chat([_openai_message(one) for one in conversation.messages[:index]]), conversation.tools
        )
        if len(prompt) > _LONGEST_PROMPT:
            return
        call = message["tool_calls"][0]["function"] if kind == "call" else None
        is_edit = call is not None and last_call is not None and call["name"] == last_call["name"]
        prediction = call_text(**last_call) if is_edit and last_call is not None else ""
        if kind in kinds:
            yield TalkTurn(prompt, _encoder().tokenizer.encode(prediction, allow_special=True) if prediction else ())
        last_call = call or last_call


def _openai_message(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {"id": "call_1", "type": "function", "function": {**function, "arguments": _json(function["arguments"])}}
        for function in (call["function"] for call in message.get("tool_calls", ()))
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@cache
def _encoder() -> PromptEncoder:
    return ModelFolder.load(DEMO_MODEL).prompt_encoder(SystemClock())


def as_request(name: str, turn: TalkTurn, talk: int) -> EngineRequest:
    """The turn as its gateway would send it: agents greedy and of one tenant, chats sampled and each of its own."""
    is_chat = name == "chat"
    return EngineRequest(
        request_id=RequestId(new_id("req")),
        prompt_token_ids=turn.prompt_token_ids,
        sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=float(is_chat), seed=len(turn.prompt_token_ids)),
        domain=IsolationDomain(f"{name} {talk if is_chat else 0}".encode()),
        prediction_token_ids=turn.prediction_token_ids,
    )
