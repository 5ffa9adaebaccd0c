"""Runs the caller's tools. All calls of a turn run at the same time, and each has a time limit. Never sends an output.

Invariant: each call gets exactly one output, in the order of the calls. If a tool fails, the output is its error.
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
"""Maps the names that the model calls to plain or async functions. A function gets the arguments as keywords."""

TOOL_TIMEOUT_S = 60.0
ToolTimeout = float | None | Mapping[str, float | None]
"""The time limit of a tool call in seconds. None means no limit.

A mapping sets a limit for each tool by name. A tool that is not in the mapping has the limit TOOL_TIMEOUT_S.
"""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """The output of one tool call, as text. `call_id` is the id of the call."""

    call_id: str
    output: str

    def body(self) -> dict[str, str]:
        return {"call_id": self.call_id, "output": self.output}


async def run_tools(calls: Sequence[PendingCall], tools: Tools, limits: ToolTimeout) -> list[ToolOutput]:
    """Runs all tool calls at the same time, and returns their outputs in the order of the calls.

    Python cannot stop a thread. So a plain function that exceeds its time limit keeps its thread until the function
    returns.
    """
    if not calls:
        return []
    executor = ThreadPoolExecutor(max_workers=len(calls), thread_name_prefix="graftwork-tool")
    try:
        return await asyncio.gather(*[_answer(call, tools, limit_of(call.name, limits), executor) for call in calls])
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def limit_of(name: str, limits: ToolTimeout) -> float | None:
    """Returns the time limit in seconds of the tool `name`. None means no limit."""
    return limits.get(name, TOOL_TIMEOUT_S) if isinstance(limits, Mapping) else limits


async def _answer(call: PendingCall, tools: Tools, limit_s: float | None, executor: ThreadPoolExecutor) -> ToolOutput:
    """Runs one tool. The output is the tool's result, or `{"error": …}` if the tool failed."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            result = await _run(call, tools, executor)
        return ToolOutput(call.call_id, _text(result))
    except TimeoutError as error:
        was_late = limit_s is not None and limit.expired()  # if false, the tool itself raised TimeoutError
        return _failure(call, f"{call.name} did not answer within {limit_s:g} seconds" if was_late else _told(error))
    except asyncio.CancelledError as error:
        if _is_cancelled():
            raise
        return _failure(call, _told(error))
    except Exception as error:  # noqa: BLE001 - the model gets every error of a tool
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
    except StopIteration as error:  # a future cannot hold a StopIteration
        raise RuntimeError("the tool raised StopIteration") from error


def _is_cancelled() -> bool:
    """Returns whether the program cancelled this task. If not, the tool itself raised CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _text(result: object) -> str:
    """Converts a tool's result to text. Text stays unchanged, and any other value becomes JSON.

    Raises ValueError or TypeError for a value that has no JSON form or no UTF-8 form.
    """
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    text.encode()  # raises UnicodeEncodeError for half a surrogate pair, which the SDK cannot send
    return text


def _failure(call: PendingCall, explanation: str) -> ToolOutput:
    return ToolOutput(call.call_id, json.dumps({"error": explanation}))


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
