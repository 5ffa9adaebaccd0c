"""What one turn goes by: the session's settings under the turn's own, checked, in the engine's terms.

Owns which settings a session may have, but for the schemas in them, which the planner of answers reads.
A turn's `sampling` replaces the session's field by field; its `tool_choice` and `response_format` replace them whole.
`tool_choice: "none"` leaves the tools in the prompt, which is never rendered anew: the answer is just not read for
calls, so that whatever the model writes is text.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graftwork.engine.core.sampling import SamplingParams
from graftwork.platform.errors import ContextLengthExceeded, InvalidRequest, ValidationFailed
from graftwork.sessions.core.session import SessionSettings
from graftwork.sessions.generation.constraints import AnswerDemands
from graftwork.sessions.generation.response_format import FormFields, read_response_format
from graftwork.sessions.generation.sampling import MAX_BIASED_TOKENS, parse_logit_bias
from graftwork.sessions.tools.tool_choice import read_tool_choice, tool_names

ASSUMED_TOKENS = 256
"""What is reserved for an answer without a limit; what it makes beyond is charged when it settles."""
_MAX_STOP_STRINGS = 16
_MAX_STOP_CHARACTERS = 256
_MAX_STOP_TOKENS = 128
_MAX_TOOLS = 128
_SEED_MASK = (1 << 64) - 1

Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class TurnOverrides:
    """What a turn asks for itself alone; None leaves the session's own."""

    tool_choice: Any = None
    response_format: Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] | None = None

    def over(self, settings: SessionSettings) -> SessionSettings:
        """The session's settings with these over them, checked. Raises ValidationFailed."""
        return checked_settings(
            replace(
                settings,
                tool_choice=settings.tool_choice if self.tool_choice is None else self.tool_choice,
                response_format=settings.response_format if self.response_format is None else self.response_format,
                sampling={**settings.sampling, **(self.sampling or {})},
            )
        )


NO_OVERRIDES = TurnOverrides()


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """How far a turn may go."""

    max_tokens: int
    expected_tokens: int
    """Prompt and answer as they are reserved with the quota."""


def checked_settings(settings: SessionSettings) -> SessionSettings:
    """The settings, if they can be served and stored. Raises ValidationFailed naming the field."""
    if len(settings.tools) > _MAX_TOOLS:
        raise ValidationFailed(f"tools may be at most {_MAX_TOOLS}.", param="tools")
    _check_answer(settings)
    _check_sampling(settings.sampling)
    _check_storable(settings.tools, "tools")
    _check_storable(settings.instructions, "instructions")
    _check_storable(settings.response_format, "response_format")
    return settings


def answer_demands(settings: SessionSettings) -> AnswerDemands:
    """What the settings ask of an answer."""
    return AnswerDemands(
        tools=settings.tools,
        tool_choice=settings.tool_choice,
        parallel_tool_calls=settings.parallel_tool_calls,
        form=FormFields(settings.response_format),
    )


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises ValidationFailed unless it can be stored."""
    _check_storable(dict(metadata), "metadata")


def token_budget(settings: SessionSettings, prompt_tokens: int, context_tokens: int) -> TokenBudget:
    """What the context leaves for an answer, and no more than was asked for.

    A session's `max_tokens` holds for all its turns, so near the end of the context it is cut rather than refused.
    Raises ContextLengthExceeded if not one token is left.
    """
    if prompt_tokens + 1 > context_tokens:
        raise ContextLengthExceeded(
            f"This model's context is {context_tokens} tokens and the turn's prompt has {prompt_tokens}, which leaves "
            "none for an answer: rewind to an earlier checkpoint, or send less.",
            param="input",
            details={"context_tokens": context_tokens, "prompt_tokens": prompt_tokens},
        )
    left = context_tokens - prompt_tokens
    asked: int | None = _given(settings.sampling, "max_completion_tokens", _given(settings.sampling, "max_tokens"))
    max_tokens = left if asked is None else min(asked, left)
    return TokenBudget(max_tokens, prompt_tokens + (min(left, ASSUMED_TOKENS) if asked is None else max_tokens))


def sampling_params(settings: SessionSettings, max_tokens: int) -> SamplingParams:
    """The checked settings in the engine's terms."""
    sampling = settings.sampling
    top_k: int | None = _given(sampling, "top_k")
    seed: int | None = _given(sampling, "seed")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_given(sampling, "temperature", 1.0),
        top_k=top_k if top_k is not None and top_k > 0 else None,
        top_p=_given(sampling, "top_p", 1.0),
        min_p=_given(sampling, "min_p", 0.0),
        seed=None if seed is None else seed & _SEED_MASK,
        min_tokens=min(_given(sampling, "min_tokens", 0), max_tokens),
        stop_token_ids=tuple(_given(sampling, "stop_token_ids", ())),
        ignore_eos=_given(sampling, "ignore_eos", False),
        presence_penalty=_given(sampling, "presence_penalty", 0.0),
        frequency_penalty=_given(sampling, "frequency_penalty", 0.0),
        repetition_penalty=_given(sampling, "repetition_penalty", 1.0),
        logit_bias=parse_logit_bias(_given(sampling, "logit_bias", {})),
    )


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValidationFailed naming the field that holds an id which no token has."""
    named = {"stop_token_ids": params.stop_token_ids, "logit_bias": [token_id for token_id, _ in params.logit_bias]}
    for field, token_ids in named.items():
        if any(token_id >= vocab_size for token_id in token_ids):
            message = f"sampling.{field} holds an id outside the vocabulary of {vocab_size} tokens."
            raise ValidationFailed(message, param=f"sampling.{field}")


def stop_strings(settings: SessionSettings) -> tuple[str, ...]:
    """Where an answer's text ends."""
    stop: str | Sequence[str] = _given(settings.sampling, "stop", ())
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _given(sampling: Mapping[str, Any], name: str, otherwise: Any = None) -> Any:
    """A null is as good as absent."""
    value = sampling.get(name)
    return otherwise if value is None else value


def _number(low: float, high: float, *, above: bool = False) -> Check:
    def check(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        return (low < value if above else low <= value) and value <= high

    return check


def _whole(low: int, high: int) -> Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_stop(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or len(stops) > _MAX_STOP_STRINGS:
        return False
    return all(isinstance(stop, str) and 0 < len(stop) <= _MAX_STOP_CHARACTERS for stop in stops)


def _is_token_ids(value: Any) -> bool:
    is_id = _whole(0, 1 << 53)
    return isinstance(value, list | tuple) and len(value) <= _MAX_STOP_TOKENS and all(map(is_id, value))


def _is_logit_bias(value: Any) -> bool:
    try:
        parse_logit_bias(value)
    except ValueError:
        return False
    return True


_SAMPLING_FIELDS: Mapping[str, tuple[Check, str]] = {
    "temperature": (_number(0, 2), "a number from 0 to 2"),
    "top_p": (_number(0, 1, above=True), "a number above 0, at most 1"),
    "top_k": (_whole(-1, 1 << 30), "a whole number, at least 1 (-1 and 0 keep all)"),
    "min_p": (_number(0, 1), "a number from 0 to 1"),
    "seed": (_whole(-(1 << 63), (1 << 64) - 1), "a whole number of 64 bits"),
    "max_tokens": (_whole(1, 1 << 53), "a whole number, at least 1"),
    "max_completion_tokens": (_whole(1, 1 << 53), "a whole number, at least 1"),
    "min_tokens": (_whole(0, 1 << 53), "a whole number, at least 0"),
    "ignore_eos": (lambda value: isinstance(value, bool), "true or false"),
    "stop_token_ids": (_is_token_ids, f"a list of at most {_MAX_STOP_TOKENS} token ids"),
    "presence_penalty": (_number(-2, 2), "a number from -2 to 2"),
    "frequency_penalty": (_number(-2, 2), "a number from -2 to 2"),
    "repetition_penalty": (_number(0.01, 100), "a number from 0.01 to 100"),
    "logit_bias": (_is_logit_bias, f"an object of at most {MAX_BIASED_TOKENS} token ids, with -100 to 100 for each"),
    "stop": (_is_stop, f"a text, or at most {_MAX_STOP_STRINGS} texts of 1 to {_MAX_STOP_CHARACTERS} characters"),
}
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "n": (1,),
}
"""Known but not served: only a value that asks for nothing is taken."""


def _check_sampling(sampling: Mapping[str, Any]) -> None:
    for name, value in sampling.items():
        param = f"sampling.{name}"
        if name in _NEUTRAL_VALUES:
            if value is not None and value not in _NEUTRAL_VALUES[name]:
                raise ValidationFailed(f"{param} is not served: leave it out.", param=param, code="unsupported_value")
        elif name not in _SAMPLING_FIELDS:
            raise ValidationFailed(f"There is no sampling field {name!r}.", param=param)
        elif value is not None and not _SAMPLING_FIELDS[name][0](value):
            raise ValidationFailed(f"{param} must be {_SAMPLING_FIELDS[name][1]}.", param=param)


def _check_answer(settings: SessionSettings) -> None:
    try:
        read_tool_choice(settings.tool_choice, tool_names(settings.tools))
        read_response_format(settings.response_format)
    except InvalidRequest as error:
        raise ValidationFailed(error.message, param=error.param) from error


def _check_storable(value: Any, param: str) -> None:
    """Raises ValidationFailed unless `value` is JSON that databases hold and UTF-8 that has tokens."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
        raise ValidationFailed(f"{param} cannot be stored: {error}.", param=param) from error
