"""Defines what an adapter's requests have unless they say otherwise: a system prompt, sampling, a format, tools.

Owns the stored form. Never checks a schema or a sampling field, and never changes a request: the API and the sessions do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class AdapterDefaults:
    """The defaults of one adapter, in the shapes of OpenAI's chat completions. A request may override each of them."""

    system: str | None = None
    """The system prompt of a conversation that has none."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling fields by name. A request overrides each by itself."""
    response_format: Mapping[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    """The tools of a request that names none. A request with an empty list has none."""

    @classmethod
    def from_json(cls, stored: Mapping[str, Any] | None) -> "AdapterDefaults":
        """Reads the form of `to_json`; None has no defaults."""
        if stored is None:
            return NO_DEFAULTS
        return cls(**{**stored, "tools": tuple(stored.get("tools", ()))})

    def to_json(self) -> dict[str, Any]:
        """Returns the defaults that are set, by name."""
        found = {
            "system": self.system,
            "sampling": dict(self.sampling),
            "response_format": self.response_format,
            "tools": list(self.tools),
        }
        return {name: value for name, value in found.items() if value not in (None, {}, [])}


NO_DEFAULTS = AdapterDefaults()
