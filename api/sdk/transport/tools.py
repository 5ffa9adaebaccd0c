"""Runs the caller's tools: all calls of a turn at once, each with a time limit.

Invariant: each call gets exactly one output, in the order of the calls. A tool that fails answers with its error.
"""

import asyncio
import contextvars
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from graftwork.platform.answers.sessions import PendingCall

Tools = Mapping[str, Callable[..., Any]]
"""Functions, plain or async, by the name that the model calls. They get the arguments as keywords."""

TOOL_TIMEOUT_S = 60.0
ToolTimeout = float | None | Mapping[str, float | None]
"""The limit of each call in seconds, None for no limit, or a mapping from tool names to limits. Tools that the mapping
lacks have TOOL_TIMEOUT_S."""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """The output of one call."""

    call_id: str
    output: str

    def body(self) -> dict[str, str]:
        return {"call_id": self.call_id, "output": self.output}


async def run_tools(calls: Sequence[PendingCall], tools: Tools, limits: ToolTimeout) -> list[ToolOutput]:
    """Run all calls at the same time.

    A plain function that exceeds its limit keeps its thread until it returns, because threads cannot be stopped.
    """
    if not calls:
        return []
    executor = ThreadPoolExecutor(max_workers=len(calls), thread_name_prefix="graftwork-tool")
    try:
        return await asyncio.gather(*[_answer(call, tools, limit_of(call.name, limits), executor) for call in calls])
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def limit_of(name: str, limits: ToolTimeout) -> float | None:
    """The limit of one tool in seconds."""
    return limits.get(name, TOOL_TIMEOUT_S) if isinstance(limits, Mapping) else limits


async def _answer(call: PendingCall, tools: Tools, limit_s: float | None, executor: ThreadPoolExecutor) -> ToolOutput:
    """Run one tool. Its output is what it returned, or `{"error": …}`."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            result = await _run(call, tools, executor)
        return ToolOutput(call.call_id, _text(result))
    except TimeoutError as error:
        was_late = limit_s is not None and limit.expired()  # a tool may have timeouts of its own
        return _failure(call, f"{call.name} did not answer within {limit_s:g} seconds" if was_late else _told(error))
    except asyncio.CancelledError as error:
        if _is_cancelled():
            raise
        return _failure(call, _told(error))
    except Exception as error:  # noqa: BLE001 - whatever a tool raises is for the model to hear
        return _failure(call, _told(error))


async def _run(call: PendingCall, tools: Tools, executor: ThreadPoolExecutor) -> Any:
    if call.name not in tools:
        raise LookupError(f"there is no tool {call.name!r}; the tools are {', '.join(sorted(tools)) or 'none'}")
    function, arguments = tools[call.name], json.loads(call.arguments or "{}")
    if not isinstance(arguments, dict):
        raise TypeError("the arguments must be a JSON object")
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    context = contextvars.copy_context()
    work = asyncio.get_running_loop().run_in_executor(executor, lambda: context.run(_called, function, arguments))
    result = await work
    return await result if inspect.isawaitable(result) else result


def _called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return function(**arguments)
    except StopIteration as error:  # no future can hold one
        raise RuntimeError("the tool raised StopIteration") from error


def _is_cancelled() -> bool:
    """Whether the program cancels this task, and not the tool."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _text(result: object) -> str:
    """Convert a result to text: a text stays, any other value becomes JSON. Raises ValueError or TypeError."""
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    text.encode()  # half a surrogate pair could not be sent
    return text


def _failure(call: PendingCall, explanation: str) -> ToolOutput:
    return ToolOutput(call.call_id, json.dumps({"error": explanation}))


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
