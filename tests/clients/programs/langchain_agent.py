"""LangChain's agent, or LangGraph's older one, on ChatOpenAI with a checkpointer. Mode: plain or streamed."""

import sys
import warnings
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent
from weather import MODEL, QUESTIONS, Report

maker, mode = sys.argv[1:]
report = Report()


@tool
def get_weather(city: str) -> str:
    """The weather now."""
    return report.get_weather(city)


warnings.simplefilter("ignore")  # LangGraph's own agent is deprecated in favour of LangChain's
make: Any = create_agent if maker == "langchain" else create_react_agent
agent = make(ChatOpenAI(model=MODEL), [get_weather], checkpointer=InMemorySaver())
config: Any = {"configurable": {"thread_id": "1"}}
for question in QUESTIONS:
    asked = {"messages": [{"role": "user", "content": question}]}
    if mode == "plain":
        agent.invoke(asked, config)
    else:
        for _ in agent.stream(asked, config, stream_mode="messages"):
            pass
    messages = agent.get_state(config).values["messages"]
    report.answers.append(messages[-1].content)
for message in messages:
    if isinstance(message, AIMessage) and message.usage_metadata:
        report.usage.append((message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"]))
report.print()
