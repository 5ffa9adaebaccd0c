"""Defines the sampling fields: the settings that decide how the next token of a request is chosen.

Owns the default, the range, the description and the check of each field. Never depends on a vocabulary. gRPC messages
and the HTTP API use these definitions.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from graftwork.platform.errors import InvalidRequest

MAX_TOP_LOGPROBS = 20
"""The most alternatives that can be reported for each token."""

MAX_PROMPT_LOGPROBS = 1 << 17
"""The most log probabilities that one request may ask for its prompt: tokens of the prompt times alternatives plus one.

They are kept in memory until the answer is sent.
"""

_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a number may have: `ge` and `gt` are its lower bounds, `le` and `lt` its upper bounds.

    None means no bound. If a sampling field holds several numbers, each of them must be in the range.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def holds(self, value: float) -> bool:
        """Returns whether a value is in the range. NaN and infinities never are."""
        return (
            math.isfinite(value)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        """Returns the range as words for a client: `at least 1`, or `at least 0 and at most 2`."""
        words = {"at least": self.ge, "above": self.gt, "at most": self.le, "below": self.lt}
        return " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)

    def bounds(self) -> dict[str, float]:
        """Returns the bounds that are not None, by their names: `ge`, `gt`, `le`, `lt`.

        pydantic's `Field` has parameters of the same names.
        """
        bounds = {"ge": self.ge, "gt": self.gt, "le": self.le, "lt": self.lt}
        return {name: bound for name, bound in bounds.items() if bound is not None}


def _described(description: str, **bounds: float) -> dict[str, Any]:
    """Returns the metadata of a sampling field: its description, and its range if it has one."""
    return {"description": description, "range": Range(**bounds) if bounds else None}


DEFAULT_SINKS = 4
"""The first tokens that a request with a rolling window still sees, if it names no number. Source: StreamingLLM."""


SMALLEST_KV_BUDGET = 64
"""The smallest number of tokens that a prompt may be reduced to."""
MOST_ROLLING_TOKENS = 1 << 20
"""The longest text of a request with a rolling window: a process keeps all its token ids."""


@dataclass(frozen=True, slots=True)
class RollingWindow:
    """Which tokens a token attends to: the first `sinks` of the text, and the last `window` up to itself."""

    sinks: int
    window: int

    @classmethod
    def of(cls, window: int | None, sinks: int | None) -> "RollingWindow | None":
        """Returns the window of a request with these fields: None for one that sees all its text."""
        return None if window is None else cls(DEFAULT_SINKS if sinks is None else sinks, window)

    def seen_of(self, num_tokens: int) -> int:
        """Returns how many of the first `num_tokens` tokens the next one attends to."""
        return min(num_tokens, self.sinks + self.window - 1)

    def longest_text(self, context_tokens: int) -> int:
        """Returns the most tokens of prompt and answer together, of a model with a context of `context_tokens`.

        The distances that a model meets are those of what is seen, so the text may be longer than the context if that fits
        into it. Source: StreamingLLM, section 3.2.
        """
        return (
            max(context_tokens, MOST_ROLLING_TOKENS) if self.sinks + self.window <= context_tokens else context_tokens
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling fields of one request. A new field needs one line here and the code that uses it."""

    max_tokens: int = field(metadata=_described("The most tokens to generate.", ge=0))
    temperature: float = field(
        default=1.0, metadata=_described("Flattens the distribution; 0 takes the likeliest token.", ge=0, le=2)
    )
    top_k: int | None = field(
        default=None, metadata=_described("Keep only the k likeliest tokens; None keeps all.", ge=1)
    )
    top_p: float = field(
        default=1.0,
        metadata=_described("Keep only the likeliest tokens that together have this probability.", gt=0, le=1),
    )
    min_p: float = field(
        default=0.0, metadata=_described("Drop tokens less likely than this fraction of the likeliest one.", ge=0, le=1)
    )
    seed: int | None = field(
        default=None,
        metadata=_described("Equal seeds give equal answers, whatever the batch; None draws a seed.", ge=0, lt=1 << 64),
    )
    min_tokens: int = field(default=0, metadata=_described("Do not sample a stop token before this many tokens.", ge=0))
    stop_token_ids: tuple[int, ...] = field(
        default=(), metadata=_described("Tokens that end the answer, besides the model's own.", ge=0)
    )
    ignore_eos: bool = field(default=False, metadata=_described("Go on past the model's own end-of-sequence tokens."))
    presence_penalty: float = field(
        default=0.0, metadata=_described("Subtracted from the logit of every token generated before.", ge=-2, le=2)
    )
    frequency_penalty: float = field(
        default=0.0, metadata=_described("Subtracted once for each time that a token was generated.", ge=-2, le=2)
    )
    repetition_penalty: float = field(
        default=1.0,
        metadata=_described(
            "Divides positive logits of tokens in the prompt and the answer, and multiplies negative ones.",
            ge=0.01,
            le=100,
        ),
    )
    logit_bias: tuple[tuple[int, float], ...] = field(
        default=(), metadata=_described("Pairs of a token and the number added to its logit; each token once.")
    )
    logprobs: int | None = field(
        default=None,
        metadata=_described(
            "How many likely tokens to report beside each chosen one; None reports nothing.", ge=0, le=MAX_TOP_LOGPROBS
        ),
    )
    prompt_logprobs: int | None = field(
        default=None,
        metadata=_described(
            "How many likely tokens to report beside each token of the prompt; None reports nothing.",
            ge=0,
            le=MAX_TOP_LOGPROBS,
        ),
    )
    attention_window: int | None = field(
        default=None,
        metadata=_described(
            "Each token attends to the last so many tokens only, and to the first ones (attention_sinks); None: to all.",
            ge=1,
            le=1 << 30,
        ),
    )
    attention_sinks: int | None = field(
        default=None,
        metadata=_described(
            f"With attention_window: how many of the first tokens each token attends to besides; None: {DEFAULT_SINKS}.",
            ge=0,
            le=1 << 30,
        ),
    )
    kv_budget: int | None = field(
        default=None,
        metadata=_described(
            "Keep the KV of about so many tokens of the prompt, those that its end attends to most, and answer from these; "
            "None: of all.",
            ge=SMALLEST_KV_BUDGET,
            le=1 << 30,
        ),
    )
    choice: int = field(
        default=0,
        metadata=_described("The number of this answer among those to one prompt; each draws its own noise.", ge=0),
    )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen. True for temperature 0.

        Also true for a temperature so small that dividing by it would overflow fp32.
        """
        return self.temperature < _GREEDY_BELOW

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty is set, so that the tokens generated so far must be counted."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def rolling_window(self) -> RollingWindow | None:
        """The tokens that a token attends to; None for all up to itself."""
        return RollingWindow.of(self.attention_window, self.attention_sinks)

    def check(self) -> None:
        """Checks every field.

        Raises InvalidRequest with the name of the first field whose value is outside its range.
        """
        for name, allowed in RANGES.items():
            if not all(map(allowed.holds, _numbers(getattr(self, name)))):
                raise InvalidRequest(f"{name} must be {allowed}.", param=name)
        if not all(math.isfinite(bias) for _, bias in self.logit_bias):
            raise InvalidRequest("Each bias in logit_bias must be a finite number.", param="logit_bias")
        if self.kv_budget is not None and self.attention_window is not None:
            raise InvalidRequest(
                "kv_budget and attention_window are two ways to forget: send one of them.", param="kv_budget"
            )
        if self.attention_sinks is not None and self.attention_window is None:
            raise InvalidRequest(
                "attention_sinks has no effect without attention_window: send both, or neither.",
                param="attention_sinks",
            )


RANGES: dict[str, Range] = {one.name: one.metadata["range"] for one in fields(SamplingParams) if one.metadata["range"]}
"""The range of each field that has one, by field name."""

DESCRIPTIONS: dict[str, str] = {one.name: one.metadata["description"] for one in fields(SamplingParams)}
"""One sentence about each field, by field name."""


def _numbers(value: float | tuple[int, ...] | None) -> Iterator[float]:
    """Yields the numbers that a field holds: none, one or several."""
    if isinstance(value, tuple):
        yield from value
    elif value is not None:
        yield value
