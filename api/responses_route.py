"""How routes of the Responses API say what is wrong: in that API's names, not in those of sessions underneath."""

import re

from graftwork.api.guarded_route import OpenAiRoute
from graftwork.platform.errors import GraftworkError, InvalidRequest, ValidationFailed

_NAMES = (
    (re.compile(r"\b(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\bsampling\.max_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\bsampling\."), ""),
    (re.compile(r"^messages\b"), "input"),
)
"""A session's settings are in chat.completions' forms: how its fields are called, and how they are here."""


class ResponsesRoute(OpenAiRoute):
    """An OpenAI route on top of sessions."""

    def in_kind(self, error: InvalidRequest | ValidationFailed) -> GraftworkError:
        renamed = type(error)(
            _renamed(error.message),
            param=None if error.param is None else _renamed(error.param),
            code=error.code,
            details=error.details,
        )
        return super().in_kind(renamed)


def _renamed(text: str) -> str:
    for pattern, name in _NAMES:
        text = pattern.sub(name, text)
    return text
