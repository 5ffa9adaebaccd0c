"""The error of this room, which names what is not served and where, and the list of gaps for callers that allow them."""

from dataclasses import dataclass, field

from graftwork.platform.errors import InvalidRequest

UNSUPPORTED = "unsupported_grammar"


def refused(pointer: str, reason: str) -> InvalidRequest:
    """Make the error. `pointer` is a URI fragment: `#` for the whole schema, `#/properties/a/not` for a part."""
    return InvalidRequest(f"The grammar cannot be enforced at {pointer}: {reason}", param=pointer, code=UNSUPPORTED)


@dataclass(slots=True)
class Gaps:
    """Collects what cannot be enforced. For a strict grammar the first gap is an error."""

    strict: bool
    pointers: dict[str, str] = field(default_factory=dict)
    """JSON pointers of what is not enforced, with reasons."""

    def meet(self, pointer: str, reason: str) -> None:
        """Record a keyword that cannot be enforced. Raises InvalidRequest if the grammar is strict."""
        if self.strict:
            raise refused(pointer, reason)
        self.pointers.setdefault(pointer, reason)

    def listed(self) -> tuple[tuple[str, str], ...]:
        """All gaps, sorted by pointer."""
        return tuple(sorted(self.pointers.items()))
