"""OpenAI's Agents SDK at its defaults, which are Responses. Mode: plain or streamed."""

import asyncio
import sys

from agents import Agent, Runner, SQLiteSession, function_tool
from weather import MODEL, QUESTIONS, Report

report = Report()


@function_tool
def get_weather(city: str) -> str:
    """The weather now.

    Args:
        city: Where.
    """
    return report.get_weather(city)


async def main() -> None:
    agent = Agent(name="Forecaster", instructions="Be brief.", model=MODEL, tools=[get_weather])
    session = SQLiteSession("conversation")
    for question in QUESTIONS:
        if sys.argv[1] == "plain":
            result = await Runner.run(agent, question, session=session)
        else:
            result = Runner.run_streamed(agent, question, session=session)
            async for _ in result.stream_events():
                pass
        report.answers.append(result.final_output)
        for response in result.raw_responses:
            report.count(response.usage)


asyncio.run(main())
report.print()
