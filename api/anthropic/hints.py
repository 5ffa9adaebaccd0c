"""Lists the parts of a request that the server ignores, because they are hints that never change the answer's meaning.

Owns the list of hints. The header `x-graftwork-ignored` of the answer names each of them, with its value or its type:

    thinking (adaptive), output_config.effort (high), messages[1].content[0] (redacted_thinking), anthropic-beta

Never refuses a request: `schemas.py` and `messages.py` refuse what would change the answer.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from graftwork.api.anthropic.cache_control import cache_controls, is_served
from graftwork.api.anthropic.schemas import CountTokensRequest

BETA_HEADER = "anthropic-beta"
BILLING_TEXT = "x-anthropic-billing-header:"
"""The beginning of a text that Claude Code puts before its system prompt. It is for Anthropic's servers, not the model.

It changes from session to session, so a prompt with it would share its KV with no other session.
"""
UNSHOWN_BLOCKS = ("redacted_thinking", "fallback")
"""The types of blocks in an assistant's message that the model cannot read, and that add nothing to its text."""


def ignored_places(body: CountTokensRequest, headers: Mapping[str, str], *, reasons: bool = False) -> list[str]:
    """Returns the path of each part of the request that the server ignores, with what it is in parentheses.

    `reasons` says whether the model reasons, so that `thinking` counts.
    """
    found = [*_hints(body, reasons=reasons)]
    found += [f"{place}.ttl ({ttl})" for place, ttl in cache_controls(body) if not is_served(ttl)]
    found += [*_hints_of_blocks(body.system, "system")]
    for index, message in enumerate(body.messages):
        found += _hints_of_blocks(message.content, f"messages[{index}].content")
    if BETA_HEADER in headers:
        found.append(BETA_HEADER)
    return found


def _hints(body: CountTokensRequest, *, reasons: bool) -> Iterator[str]:
    if not reasons and body.thinking is not None and body.thinking.type != "disabled":
        yield f"thinking ({body.thinking.type})"
    if body.output_config is not None and body.output_config.effort is not None:
        yield f"output_config.effort ({body.output_config.effort})"
    for name, value in {
        "context_management": body.context_management,
        "metadata": None if body.metadata is not None and body.metadata.user_id else body.metadata,
        **(body.model_extra or {}),
    }.items():
        if value is not None:
            yield name


def _hints_of_blocks(content: object, param: str) -> Iterator[str]:
    for index, block in enumerate(content if isinstance(content, list) else ()):
        for path, explanation in _HINTS_OF_BLOCK:
            if (said := explanation(block)) is not None:
                yield f"{param}[{index}]{path} ({said})"


def is_billing_text(block: Mapping[str, Any]) -> bool:
    """Returns whether a block of the system prompt is Claude Code's note to Anthropic's billing."""
    text = block.get("text")
    return isinstance(text, str) and text.startswith(BILLING_TEXT)


def _unshown(block: Mapping[str, Any]) -> str | None:
    kind = block.get("type")
    return kind if isinstance(kind, str) and kind in UNSHOWN_BLOCKS else None


def _billing(block: Mapping[str, Any]) -> str | None:
    return BILLING_TEXT.removesuffix(":") if is_billing_text(block) else None


def _citations(block: Mapping[str, Any]) -> str | None:
    citations = block.get("citations")
    return "enabled" if isinstance(citations, Mapping) and citations.get("enabled") is True else None


_HINTS_OF_BLOCK: tuple[tuple[str, Callable[[Mapping[str, Any]], str | None]], ...] = (
    ("", _unshown),
    ("", _billing),
    (".citations", _citations),
)
"""Pairs of a path inside a block, and the function that returns what is ignored there, or None."""
