"""The two kinds of request bodies: what OpenAI's clients send, and what is only ours.

Both are strict (no strings for numbers, no NaN). They differ in what they do with fields they do not know.
"""

from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from graftwork.sessions.generation.sampling import SamplingFields


class OpenAiBody(BaseModel):
    """A body of an OpenAI-compatible route: clients send fields of every vintage, the unknown are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())


class NativeBody(BaseModel):
    """A body of a native or admin route: a misspelt field is an error, not a silent default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class SamplingBody(SamplingFields, OpenAiBody):
    """A body of an OpenAI-compatible route that generates."""

    @model_validator(mode="after")
    def minimum_within_maximum(self) -> Self:
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise FieldComplaint("min_tokens", f"must not exceed max_tokens ({self.max_tokens})")
        return self


class FieldComplaint(ValueError):
    """Raised by validators that look at several fields: which one of them is to blame, and why."""

    def __init__(self, field: str, explanation: str) -> None:
        super().__init__(explanation)
        self.field = field
