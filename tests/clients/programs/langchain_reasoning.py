"""LangChain's ChatAnthropic reads what the model thought before its answer. Mode: plain or streamed."""

import json
import sys
from functools import reduce
from operator import add
from typing import Any

from langchain_anthropic import ChatAnthropic
from weather import MODEL

mode = sys.argv[1]
settings: Any = {"max_tokens": 2048, "thinking": {"type": "enabled", "budget_tokens": 1024}}
chat = ChatAnthropic(model=MODEL, **settings)
message = chat.invoke("Hi") if mode == "plain" else reduce(add, chat.stream("Hi"))
blocks: Any = message.content_blocks
reasoning = "".join(block["reasoning"] for block in blocks if block["type"] == "reasoning")
said = "".join(block["text"] for block in blocks if block["type"] == "text")
print(json.dumps({"reasoning": reasoning, "text": said}))
