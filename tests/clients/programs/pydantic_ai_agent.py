"""pydantic-ai by its prefix of a provider, such as `openai` or `openai-chat`. Mode: plain or streamed."""

import asyncio
import sys
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse
from weather import MODEL, QUESTIONS, Report

provider, mode = sys.argv[1:]
report = Report()
agent = Agent(f"{provider}:{MODEL}", instructions="Be brief.")


@agent.tool_plain
def get_weather(city: str) -> str:
    """The weather now."""
    return report.get_weather(city)


async def main() -> None:
    past: list[Any] = []
    for question in QUESTIONS:
        if mode == "plain":
            result = await agent.run(question, message_history=past)
            report.answers.append(result.output)
            past = result.all_messages()
        else:
            async with agent.run_stream(question, message_history=past) as stream:
                report.answers.append(await stream.get_output())
                past = stream.all_messages()
    for message in past:
        if isinstance(message, ModelResponse):
            report.count(message.usage)


asyncio.run(main())
report.print()
