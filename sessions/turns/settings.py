"""Makes and checks the settings of a turn: the session's settings, some of them replaced for this turn.

Owns the rules for these settings. Never checks the JSON schemas in the settings: `ConstraintPlanner` does.
A turn's `sampling` replaces single fields of the session's `sampling`. A turn's `tool_choice` or `response_format`
replaces the whole value of the session. With `tool_choice: "none"` the tools stay in the prompt, so that the prompt
does not change, and all output is text.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from graftwork.adapters.format.defaults import AdapterDefaults
from graftwork.engine.core.sampling import RollingWindow, SamplingParams
from graftwork.platform.errors import InvalidRequest, ValidationFailed
from graftwork.sessions.core.session import SessionSettings
from graftwork.sessions.generation.constraints import OutputConstraints, ResponseFormatFields, read_response_format
from graftwork.sessions.generation.sampling import NEUTRAL_VALUES, SessionSampling, TokenBudget, token_budget
from graftwork.sessions.tools.tool_choice import MAX_TOOLS, read_tool_choice, tool_names


@dataclass(frozen=True, slots=True)
class TurnOverrides:
    """The values that one turn uses instead of the session's settings. None means the session's value."""

    tool_choice: Any = None
    response_format: Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] | None = None
    service_tier: str | None = None

    def over(self, settings: SessionSettings) -> SessionSettings:
        """Returns a copy of a session's settings in which these values replace the session's values.

        Raises ValidationFailed if the new settings are wrong. The error names the wrong field.
        """
        return checked_settings(
            replace(
                settings,
                tool_choice=settings.tool_choice if self.tool_choice is None else self.tool_choice,
                response_format=settings.response_format if self.response_format is None else self.response_format,
                sampling={**settings.sampling, **(self.sampling or {})},
                service_tier=settings.service_tier if self.service_tier is None else self.service_tier,
            )
        )


NO_OVERRIDES = TurnOverrides()


def with_defaults(settings: SessionSettings, defaults: AdapterDefaults, *, names_tools: bool) -> SessionSettings:
    """Returns the settings with an adapter's defaults where they say nothing. `names_tools` says that an empty list of
    tools is meant.
    """
    length = {"max_tokens", "max_completion_tokens"}
    sampling = dict(defaults.sampling)
    if length & settings.sampling.keys():
        sampling = {name: value for name, value in sampling.items() if name not in length}
    return replace(
        settings,
        instructions=defaults.system if settings.instructions is None else settings.instructions,
        tools=settings.tools if settings.tools or names_tools else defaults.tools,
        response_format=defaults.response_format if settings.response_format is None else settings.response_format,
        sampling={**sampling, **settings.sampling},
    )


def checked_settings(settings: SessionSettings) -> SessionSettings:
    """Checks that turns can use the settings, and that the database can store them. Returns the settings unchanged.

    Raises ValidationFailed for wrong settings. The error names the wrong field.
    """
    if len(settings.tools) > MAX_TOOLS:
        raise ValidationFailed(f"tools may be at most {MAX_TOOLS}.", param="tools")
    _check_answer(settings)
    read_sampling(settings.sampling)
    _check_storable(settings.tools, "tools")
    _check_storable(settings.instructions, "instructions")
    _check_storable(settings.response_format, "response_format")
    return settings


def output_constraints(settings: SessionSettings) -> OutputConstraints:
    """Returns those settings that limit what the model may write, in the form that `ConstraintPlanner` takes."""
    return OutputConstraints(
        tools=settings.tools,
        tool_choice=settings.tool_choice,
        parallel_tool_calls=settings.parallel_tool_calls,
        response_format=ResponseFormatFields(settings.response_format),
    )


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Checks that the database can store the metadata of a session: all texts must be valid Unicode.

    Raises ValidationFailed if not.
    """
    _check_storable(dict(metadata), "metadata")


def turn_budget(settings: SessionSettings, prompt_tokens: int, context_tokens: int) -> TokenBudget:
    """Returns the token budget of a turn's answer.

    The answer may have `max_tokens` of the sampling settings, but never more tokens than the prompt leaves free in the
    context. Without `max_tokens`, it may have all free tokens. With a rolling window, see `token_budget`.
    Raises ContextLengthExceeded if the prompt leaves no token for the answer.
    """
    fields = read_sampling(settings.sampling)
    return token_budget(prompt_tokens, fields.token_limit, context_tokens, "input", fields.rolling_window)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Checks that all token ids in the sampling parameters are in the vocabulary, that is, below `vocab_size`.

    Raises ValidationFailed if not. The error names the field.
    """
    named = {"stop_token_ids": params.stop_token_ids, "logit_bias": [token_id for token_id, _ in params.logit_bias]}
    for field, token_ids in named.items():
        if any(token_id >= vocab_size for token_id in token_ids):
            message = f"sampling.{field} holds an id outside the vocabulary of {vocab_size} tokens."
            raise ValidationFailed(message, param=f"sampling.{field}")


def read_sampling(sampling: Mapping[str, Any]) -> SessionSampling:
    """Reads the field `sampling` of a session or a turn.

    Raises ValidationFailed for a wrong value. The error names the wrong field.
    """
    served = dict(sampling)
    for name, neutral in NEUTRAL_VALUES.items():
        param, value = f"sampling.{name}", served.pop(name, None)
        if value is not None and (isinstance(value, bool) != isinstance(neutral, bool) or value != neutral):
            raise ValidationFailed(f"{param} is not served: leave it out.", param=param, code="unsupported_value")
    try:
        fields = SessionSampling.model_validate(served)
    except ValidationError as error:
        entry = error.errors()[0]
        name = str(entry["loc"][0])
        if entry["type"] == "extra_forbidden":
            raise ValidationFailed(f"There is no sampling field {name!r}.", param=f"sampling.{name}") from error
        message = f"sampling.{name}: {entry['msg'].removeprefix('Value error, ')}"
        raise ValidationFailed(message, param=f"sampling.{name}") from error
    if fields.kv_budget is not None and fields.attention_window is not None:
        message = "sampling.kv_budget and sampling.attention_window are two ways to forget: send one of them."
        raise ValidationFailed(message, param="sampling.kv_budget")
    if fields.attention_sinks is not None and fields.attention_window is None:
        message = "sampling.attention_sinks has no effect without attention_window: send both, or neither."
        raise ValidationFailed(message, param="sampling.attention_sinks")
    return fields


def rolling_window(sampling: Mapping[str, Any]) -> RollingWindow | None:
    """Returns the rolling window that the field `sampling` of a session names; None without one."""
    window, sinks = sampling.get("attention_window"), sampling.get("attention_sinks")
    return SamplingParams(max_tokens=1, attention_window=window, attention_sinks=sinks).rolling_window


def _check_answer(settings: SessionSettings) -> None:
    try:
        read_tool_choice(settings.tool_choice, tool_names(settings.tools))
        read_response_format(settings.response_format)
    except InvalidRequest as error:
        raise ValidationFailed(error.message, param=error.param) from error


def _check_storable(value: Any, param: str) -> None:
    """Checks that `value` is valid JSON and valid UTF-8. Raises ValidationFailed if not."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
        raise ValidationFailed(f"{param} cannot be stored: {error}.", param=param) from error
