"""Reads the marks `cache_control` of a request in Anthropic's form: for how long the client asks to keep its prompt.

Each mark ends a prefix of the prompt. The server caches every prompt with or without a mark, and compares whole pages.
So only the time of a mark matters, not its place: the whole prompt is kept for the longest time that a mark names. The
time is a hint, so a time that the server does not know is ignored, and `hints.py` names it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from graftwork.api.anthropic.schemas import CountTokensRequest, CustomTool

_SECONDS: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}
"""The times of Anthropic's API, in seconds."""
_DEFAULT = "5m"
"""The time of a mark without `ttl`."""


def longest_ttl_s(body: CountTokensRequest) -> float | None:
    """Returns the longest time in seconds that a mark of the request asks for; None if no mark names a known time."""
    return max((_SECONDS[ttl] for _, ttl in cache_controls(body) if is_served(ttl)), default=None)


def is_served(ttl: object) -> bool:
    """Returns whether `ttl` is one of the times that the server knows."""
    return isinstance(ttl, str) and ttl in _SECONDS


def cache_controls(body: CountTokensRequest) -> Iterator[tuple[str, Any]]:
    """Yields the path and the `ttl` of each mark of a request: of the request itself, its tools, system and messages.

    The `ttl` of a content block has the type that the client sent.
    """
    yield from _control_of(body.cache_control and body.cache_control.model_dump(), "cache_control")
    for index, tool in enumerate(body.tools or ()):
        if isinstance(tool, CustomTool) and tool.cache_control is not None:
            yield from _control_of(tool.cache_control.model_dump(), f"tools[{index}].cache_control")
    contents = {"system": body.system}
    contents |= {f"messages[{index}].content": message.content for index, message in enumerate(body.messages)}
    for param, content in contents.items():
        yield from _controls_within(content, param)


def _controls_within(content: object, param: str, levels: int = 3) -> Iterator[tuple[str, Any]]:
    """Yields the marks of content blocks, and of the blocks within them: a text in a search result in a `tool_result`
    is on the third level, and there are no more levels.
    """
    for index, block in enumerate(content if isinstance(content, list) else ()):
        if isinstance(block, Mapping):
            yield from _control_of(block.get("cache_control"), f"{param}[{index}].cache_control")
            if levels > 1:
                yield from _controls_within(block.get("content"), f"{param}[{index}].content", levels - 1)


def _control_of(control: object, param: str) -> Iterator[tuple[str, Any]]:
    if isinstance(control, Mapping):
        ttl = control.get("ttl")
        yield param, _DEFAULT if ttl is None else ttl
