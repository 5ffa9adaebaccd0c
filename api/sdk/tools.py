"""Runs the caller's tools: all calls of a turn at once, each with a time limit, each failure as an answer.

Invariant: every call gets exactly one output, in the order of the calls; a tool can never break the loop.
"""

import asyncio
import contextvars
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from graftwork.api.sdk.session_answers import PendingCall

Tools = Mapping[str, Callable[..., Any]]
"""Functions, plain or async, by the name the model calls; they are called with the arguments as keywords."""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What a call answers the model with."""

    call_id: str
    output: str

    def body(self) -> dict[str, str]:
        return {"call_id": self.call_id, "output": self.output}


async def run_tools(calls: Sequence[PendingCall], tools: Tools, limit_s: float | None) -> list[ToolOutput]:
    """All calls side by side.

    A plain function that outlives its time keeps its thread until it returns; nothing can stop a thread.
    """
    if not calls:
        return []
    executor = ThreadPoolExecutor(max_workers=len(calls), thread_name_prefix="graftwork-tool")
    try:
        running = [asyncio.wait_for(_run(call, tools, executor), limit_s) for call in calls]
        results = await asyncio.gather(*running, return_exceptions=True)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
    return [
        ToolOutput(call.call_id, output_text(call, result, limit_s))
        for call, result in zip(calls, results, strict=True)
    ]


async def _run(call: PendingCall, tools: Tools, executor: ThreadPoolExecutor) -> Any:
    if call.name not in tools:
        raise LookupError(f"there is no tool {call.name!r}; the tools are {', '.join(sorted(tools)) or 'none'}")
    function, arguments = tools[call.name], json.loads(call.arguments or "{}")
    if not isinstance(arguments, dict):
        raise TypeError("the arguments must be a JSON object")
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    context = contextvars.copy_context()
    work = asyncio.get_running_loop().run_in_executor(executor, lambda: context.run(function, **arguments))
    result = await work
    return await result if inspect.isawaitable(result) else result


def output_text(call: PendingCall, result: object, limit_s: float | None) -> str:
    """Text as it is, everything else as JSON, a failure as `{"error": …}`."""
    if isinstance(result, TimeoutError):
        return json.dumps({"error": f"{call.name} did not answer within {limit_s:g} seconds"})
    if isinstance(result, Exception):
        return json.dumps({"error": f"{type(result).__name__}: {result}"})
    if isinstance(result, BaseException):
        raise result  # the program is being stopped; no tool may swallow that
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
