"""The error for a grammar that cannot be enforced, and the list of gaps: keywords that are not enforced.

The error names the place and the reason. A caller that is not strict gets the list of gaps instead.
"""

from dataclasses import dataclass, field

from graftwork.platform.errors import InvalidRequest

UNSUPPORTED = "unsupported_grammar"


def refused(pointer: str, reason: str) -> InvalidRequest:
    """Returns the error for one place of a schema.

    `pointer` is a URI fragment: `#` for the whole schema, `#/properties/a/not` for a part.
    """
    return InvalidRequest(f"The grammar cannot be enforced at {pointer}: {reason}", param=pointer, code=UNSUPPORTED)


@dataclass(slots=True)
class Gaps:
    """Collects the gaps of a grammar: keywords that cannot be enforced.

    If the grammar is strict, the first is an error.
    """

    strict: bool
    pointers: dict[str, str] = field(default_factory=dict)
    """JSON pointers of what is not enforced, with reasons."""

    def meet(self, pointer: str, reason: str) -> None:
        """Record a keyword that cannot be enforced, with the reason. Raises InvalidRequest if the grammar is strict."""
        if self.strict:
            raise refused(pointer, reason)
        self.pointers.setdefault(pointer, reason)

    def listed(self) -> tuple[tuple[str, str], ...]:
        """Returns all gaps as (pointer, reason), sorted by pointer."""
        return tuple(sorted(self.pointers.items()))
