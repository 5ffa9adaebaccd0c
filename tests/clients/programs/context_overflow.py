"""Which error a client raises for a prompt beyond the model's context. Its name and the names of its bases are printed.

The first argument is the client, the second the size of the prompt in words.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from weather import MODEL

client, words = sys.argv[1], int(sys.argv[2])
messages: list[Any] = [{"role": "user", "content": "word " * words}]


def ask_litellm(provider: str) -> None:
    import litellm

    litellm.completion(model=f"{provider}/{MODEL}", messages=messages)


def ask_langchain(package: str) -> None:
    if package == "openai":
        from langchain_openai import ChatOpenAI

        ChatOpenAI(model=MODEL).invoke(messages)
    else:
        from langchain_anthropic import ChatAnthropic

        ChatAnthropic(model_name=MODEL).invoke(messages)


def ask_anthropic(max_tokens: str) -> None:
    from anthropic import Anthropic

    Anthropic().messages.create(model=MODEL, messages=messages, max_tokens=int(max_tokens))


asks: dict[str, Callable[[str], None]] = {
    "litellm": ask_litellm,
    "langchain": ask_langchain,
    "anthropic": ask_anthropic,
}
name, _, argument = client.partition("-")
try:
    asks[name](argument)
except Exception as error:
    print(json.dumps({"names": [kind.__name__ for kind in type(error).__mro__], "message": str(error)}))
else:
    sys.exit("the prompt was answered")
