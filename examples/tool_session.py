"""A session that calls a Python function, and remembers what came of it."""

from graftwork import Graftwork

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city on a day.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "day": {"type": "string"}},
            "required": ["city", "day"],
        },
    },
}


def get_weather(city: str, day: str) -> dict[str, object]:
    """What your program would look up. The server never runs it: this process does."""
    print(f"  get_weather({city!r}, {day!r})")
    return {"city": city, "day": day, "condition": "sunny", "temperature_c": 21}


with Graftwork() as client:
    session = client.sessions.create(model="graftwork-demo", tools=[WEATHER], sampling={"temperature": 0})

    # One call runs the whole loop: question, tool call, tool, answer.
    run = session.run("What is the weather in Tokyo tomorrow?", tools={"get_weather": get_weather})
    print(f"{len(run.turns)} turns:", run.text)

    # The next turn sends only what is new; the server has the rest, as tokens and as KV.
    turn = session.turn("Thanks!")
    assert turn.usage is not None
    print(turn.text)
    print(f"{turn.usage.cached_share:.0%} of the prompt came from the cache")

    # The transcript is the server's, and any process with the key may read it.
    print("Transcript:", ", ".join(item.type for item in session.items()))
    session.close()
