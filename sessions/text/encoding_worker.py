"""The process that encodes long prompts: `python -m graftwork.sessions.text.encoding_worker <socket>`.

Receives the model's tokenizer and chat template, and nothing else of the gateway. Never loads torch, never opens a
database, and never sees a key.

    {"verb": "encode" or "count", "now", "prompt"}  →  token ids as native int32, or their number
"""

from array import array
from collections.abc import Callable, Mapping
from typing import Any

from graftwork.platform.clock import SystemClock
from graftwork.platform.worker_pool import serve
from graftwork.sessions.text.chat_template import ChatTemplate
from graftwork.sessions.text.encoding import LocalEncoding, PromptEncoder, from_plain
from graftwork.sessions.text.tokenizer import TextTokenizer


class _JobClock(SystemClock):
    """Returns the time that the gateway sent with a job, so that templates write the same date in both processes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent_s = 0.0

    def now(self) -> float:
        return self.sent_s


def prepare(setup: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], bytes | int]:
    """Returns the function that encodes prompts for the model in `setup`."""
    clock = _JobClock()
    tokenizer = TextTokenizer(setup["tokenizer"])
    encoder = None
    if (template := setup["template"]) is not None:
        made = ChatTemplate(
            template["source"],
            clock,
            special_tokens=template["special_tokens"],
            end_of_turn_texts=template["end_of_turn_texts"],
        )
        encoder = PromptEncoder(made, tokenizer, setup["context_tokens"])
    local = LocalEncoding(tokenizer, encoder, setup["context_tokens"])

    def encode(job: Mapping[str, Any]) -> bytes | int:
        clock.sent_s = job["now"]
        prompt = from_plain(job["prompt"])
        if job["verb"] == "count":
            return len(local.encode(prompt))
        return array("i", local.encode_fitting(prompt)).tobytes()

    return encode


if __name__ == "__main__":
    serve(prepare)
