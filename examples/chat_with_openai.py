"""The unmodified `openai` package against Graftwork, with a streamed answer."""

import os

from openai import OpenAI

server = os.environ.get("GRAFTWORK_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{server}/v1", api_key=os.environ["GRAFTWORK_API_KEY"])

print("Models:", ", ".join(model.id for model in client.models.list()))

stream = client.chat.completions.create(
    model="graftwork-demo",  # or one of your adapters: "name", "name@3", "name@alias"
    messages=[{"role": "user", "content": "Who are you?"}],
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        print(f"\n{chunk.usage.completion_tokens} tokens")
